"""The trace against an independent computation from recorded queries and keys, and what it promises besides."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

import prehoc
from prehoc import models, recorder
from prehoc.trace import Trace, forced_logits, position_limit, trace

PROMPT, STEPS, TOLERANCE = 120, 40, 1e-5

# Design decisions 1, 3, 4 and 5, and the trace paragraph, written out for one head at a time in float64 numpy. Nothing of
# prehoc is called here: what the tests compare against must be able to disagree.
DEFAULTS: dict[str, Any] = {
    "sink": 8,
    "local": 32,
    "critical": None,
    "mass": None,
    "block_size": 8,
    "tau": 0.8,
    "gate": "score",
    "dilate": None,
    "radius": 1,
    "refresh": "rolling",
    "local_window": "frozen",
    "granularity": "kv_head",
    "matched": False,
}


@dataclasses.dataclass
class Block:
    """What a head remembers from its anchor."""

    anchor: np.ndarray
    chosen: set[int]
    window: int
    step: int


def axes(keys: np.ndarray) -> np.ndarray:
    """Principal axes of 1,024 evenly spaced keys, the longest 16, each as long as its standard deviation."""
    sample = keys[[i * len(keys) // 1024 for i in range(1024)]]
    variances, directions = np.linalg.eigh(np.cov(sample.T, bias=True))
    return directions[:, -16:] * np.sqrt(np.maximum(variances[-16:], 0))


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rank(score: np.ndarray, offset: int) -> list[int]:
    return (offset + np.argsort(-score, kind="stable")).tolist()


def spread(best: list[int], m: int, radius: int, middle: range) -> set[int]:
    near = {column + step for column in best[:m] for step in range(-radius, radius + 1)}
    return set(best) | {column for column in near if column in middle}


def close_scores(score: np.ndarray, offset: int, best: list[int], cuts: Iterable[int]) -> bool:
    """Whether a cut of the ranking runs between two scores that float32 cannot tell apart."""
    value = [score[column - offset] for column in best]
    return any(0 < cut < len(value) and value[cut - 1] - value[cut] < TOLERANCE for cut in cuts)


class Simulator:
    """The slow truth for one trace; `excused` counts decisions within rounding of their threshold."""

    def __init__(self, found: Trace, masked: Any = None, **settings: Any) -> None:
        assert found.q is not None and found.k is not None and found.indices is not None
        self.found, self.masked = found, masked or (lambda layer, t: 0)
        self.set = types.SimpleNamespace(**{**DEFAULTS, **settings})
        self.prompt, self.excused, self.retrievals = found.meta["prompt_tokens"], 0, 0

    def check(self, layer: int, head: int, kind: str) -> None:
        found, s = self.found, self.set
        hkv = found.k.shape[1]
        per_head = found.q.shape[2] // (hkv if s.granularity == "kv_head" else found.q.shape[2])
        queries = found.q[:, layer, head * per_head : (head + 1) * per_head].astype(np.float64)  # [S, G, D]
        keys = found.k[layer, head * hkv // found.keys.shape[2]].astype(np.float64)  # [P + S, D]
        scale = found.meta["scale"][str(layer)]
        self.axes = axes(keys[s.sink : self.prompt]) if s.gate == "score" else np.eye(keys.shape[1])
        block: Block | None = None
        for step, q in enumerate(queries):
            t = self.prompt + step + 1
            logits = q @ keys[:t].T * scale
            where = (step, layer, head)
            read, block, expected = getattr(self, kind)(where, t, q, logits, block)
            self._compare(where, t, logits, read, expected)

    def dense(self, where: Any, t: int, q: Any, logits: Any, block: Any) -> Any:
        start = self.masked(where[1], t)
        return {c for c in range(t) if c < self.set.sink or c >= start}, block, (False, math.nan)

    def streaming(self, where: Any, t: int, q: Any, logits: Any, block: Any) -> Any:
        recent = self.set.critical + self.set.local
        return {c for c in range(t) if c < self.set.sink or c >= t - recent}, block, (False, math.nan)

    def oracle(self, where: Any, t: int, q: Any, logits: Any, block: Any) -> Any:
        s = self.set
        score = np.log(softmax(logits).mean(0))[s.sink : t - s.local]
        best = rank(score, s.sink)
        chosen = set(best[: s.critical])
        if close_scores(score, s.sink, best, [s.critical]):
            chosen = self._as_recorded(where, range(s.sink, t - s.local), chosen)
        return chosen | self._ends(t, t - s.local), block, (True, math.nan)

    def cis(self, where: Any, t: int, q: np.ndarray, logits: np.ndarray, block: Block | None) -> Any:
        s, step = self.set, where[0]
        middle = range(max(s.sink, self.masked(where[1], t)), t - s.local)
        if len(middle) <= (s.critical or 0):
            return {c for c in range(t) if c < s.sink or c >= middle.start}, None, (False, math.nan)
        cosine, seen = math.nan, q @ self.axes
        if block is not None:
            norms = np.linalg.norm(seen, axis=-1) * np.linalg.norm(block.anchor, axis=-1)
            cosine = float(((seen * block.anchor).sum(-1) / norms).min())
        share = cosine > s.tau
        if abs(cosine - s.tau) < TOLERANCE:
            self.excused += 1
            share = not self.found.retrieved[where]
        if s.refresh == "rolling":
            share = share and block is not None and step - block.step < s.block_size
        else:
            share = share and step % s.block_size != 0
        today = block
        if not share:
            today = Block(seen, self._retrieve(where, t, logits, middle), t - s.local, step)
            if s.refresh == "rolling" or step % s.block_size == 0 or block is None:
                block = today
        assert today is not None
        window = today.window if s.local_window == "frozen" else t - s.local
        return today.chosen | self._ends(t, window), block, (not share, cosine)

    def _retrieve(self, where: Any, t: int, logits: np.ndarray, middle: range) -> set[int]:
        s = self.set
        self.retrievals += 1
        visible = [c for c in range(t) if c < s.sink or c >= middle.start]
        lse = np.log(np.exp(logits[:, visible]).sum(-1))
        weights = np.exp(logits - lse[:, None])
        score = (logits - lse[:, None]).max(0)[middle.start : middle.stop]
        best = rank(score, middle.start)
        k = len(best) if s.critical is None else s.critical
        if s.mass is not None:
            ends = sorted(self._ends(t, t - s.local))
            k = next((n for n in range(k) if weights[:, ends + best[:n]].sum(-1).min() >= s.mass), k)
        size = k
        if s.matched:
            growth = s.block_size - 1 if s.local_window == "frozen" else 0
            size = next(n for n in range(k, -1, -1) if len(self._dilated(best, n, middle)) + growth <= k)
        chosen = self._dilated(best, size, middle)
        m = size // 3 if s.dilate is None else s.dilate
        if close_scores(score, middle.start, best, range(m, size + 1) if s.matched or s.mass else (m, size)):
            chosen = self._as_recorded(where, middle, chosen)
        return chosen

    def _dilated(self, best: list[int], k: int, middle: range) -> set[int]:
        m = k // 3 if self.set.dilate is None else min(self.set.dilate, k)
        return spread(best[:k], m, self.set.radius, middle)

    def _ends(self, t: int, window: int) -> set[int]:
        return set(range(self.set.sink)) | set(range(window, t))

    def _as_recorded(self, where: Any, middle: range, chosen: set[int]) -> set[int]:
        recorded = {int(c) for c in self.found.indices[where] if c in middle}
        self.excused += recorded != chosen
        return recorded

    def _compare(self, where: Any, t: int, logits: np.ndarray, read: set[int], expected: tuple[bool, float]) -> None:
        s, found = self.set, self.found
        listed = found.indices[where]
        assert [c for c in listed if c >= 0] == sorted(read), where
        assert found.keys[where] == len(read)
        assert bool(found.retrieved[where]) == expected[0]
        assert found.cosine[where] == pytest.approx(expected[1], abs=TOLERANCE, nan_ok=True)
        mean = softmax(logits).mean(0)
        assert found.retained[where] == pytest.approx(mean[sorted(read)].sum(), abs=TOLERANCE)
        middle = range(s.sink, t - s.local)
        best = rank(mean[middle.start : middle.stop], middle.start)
        ends = mean[: s.sink].sum() + mean[t - s.local : t].sum()
        equal = max(len(read) - s.sink - s.local, 0)
        k = equal if s.critical is None and s.mass is None else len(best) if s.critical is None else s.critical
        if s.mass is not None:
            sure = sorted(self._ends(t, t - s.local))
            each = softmax(logits)
            k = next((n for n in range(k) if each[:, sure + best[:n]].sum(-1).min() >= s.mass), k)
        assert found.oracle[where] == pytest.approx(ends + mean[best[:k]].sum(), abs=TOLERANCE)
        assert found.oracle_equal_keys[where] == pytest.approx(ends + mean[best[:equal]].sum(), abs=TOLERANCE)
        hits, chosen = len(read & set(best[:k])), best[:k]
        slack = 0.0
        if chosen and close_scores(np.log(mean[middle.start : middle.stop]), middle.start, best, [k]):
            slack = 1 / len(chosen)  # the last of them may be either of two
        if chosen:
            assert found.overlap[where] == pytest.approx(hits / len(chosen), abs=TOLERANCE + slack)
        else:
            assert math.isnan(found.overlap[where])


def psaw(phi: float, alpha: float, first: int, layers: int, local: int) -> Any:
    def masked(layer: int, t: int) -> int:
        if layer <= first:
            return 0
        return min(math.floor((1 - phi ** (alpha * (layer - first) / (layers - first))) * t), t - local)

    return masked


@pytest.fixture(scope="module")
def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.25,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # a common direction makes consecutive queries similar, as in a trained model
        model.model.embed_tokens.weight += 0.5 * torch.randn(64)
    return model


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(0, 128, (PROMPT + STEPS,), generator=torch.Generator().manual_seed(1)).tolist()


CIS = {"sink": 4, "local": 8, "critical": 24, "tau": 0.55, "block_size": 4}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"gate": "query"},
    {"granularity": "query_head"},
    {"refresh": "block"},
    {"refresh": "block", "local_window": "sliding", "granularity": "query_head"},
    {"local_window": "sliding"},
    {"matched": True},
    {"matched": True, "local_window": "sliding", "granularity": "query_head", "dilate": 5},
    {"mass": 0.7, "critical": None},
    {"mass": 0.6, "critical": 30, "granularity": "query_head"},
    {"dilate": 0},
    {"dilate": 24, "radius": 3},
    {"tau": 0.99},
    {"tau": -1.0, "block_size": 8},
    {"sink": 0, "local": 1, "critical": 60, "block_size": 16, "tau": 0.3},
    {"critical": 120},  # covered at first, then not
]


def name(settings: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in settings.items()) or "defaults"


def check_all(simulator: Simulator, kind: str) -> None:
    _, layers, heads = simulator.found.keys.shape
    for layer in range(layers):
        for head in range(heads):
            simulator.check(layer, head, kind)
    assert simulator.excused <= 0.01 * max(simulator.retrievals, 200)


@pytest.mark.parametrize("variant", VARIANTS, ids=name)
def test_cis_equals_the_independent_computation(tiny: Any, tokens: list[int], variant: dict[str, Any]) -> None:
    settings = {**CIS, **variant}
    found = trace(tiny, tokens, PROMPT, STEPS, prehoc.CIS(**settings), observe=True, record=("selections", "qk"))
    reading = {"gate", "granularity", "refresh", "local_window", "matched"}
    if set(variant) <= reading:  # both decisions must really occur
        assert 0.2 < found.summary()["retrieval_ratio"] < 0.9
    check_all(Simulator(found, **settings), "cis")


def test_cpe_with_a_depth_window_equals_the_independent_computation(tiny: Any, tokens: list[int]) -> None:
    method = prehoc.CPE(**CIS, phi=0.3, alpha=1.0, psaw_start_layer=1, etf_start_layer=1, psi=0.5)
    found = trace(tiny, tokens, PROMPT, STEPS, method, observe=True, record=("selections", "qk"))
    check_all(Simulator(found, psaw(0.3, 1.0, 1, 4, CIS["local"]), **CIS), "cis")


def test_the_other_methods_equal_the_independent_computation(tiny: Any, tokens: list[int]) -> None:
    sizes = {"sink": 4, "local": 8, "critical": 24}
    cases: list[tuple[Any, str, dict[str, Any], Any]] = [
        (prehoc.Oracle(**sizes), "oracle", sizes, None),
        (prehoc.Oracle(**sizes, granularity="query_head"), "oracle", {**sizes, "granularity": "query_head"}, None),
        (prehoc.Streaming(budget=40, sink=4), "streaming", {"sink": 4, "local": 1, "critical": 35}, None),
        (prehoc.Dense(), "dense", {}, None),
        (prehoc.PSAW(phi=0.3, start_layer=1, sink=4, local=8), "dense", {"sink": 4, "local": 8}, (0.3, 1.5, 1, 4, 8)),
        (prehoc.ETF(start_layer=1), "dense", {}, None),
    ]
    for method, kind, settings, window in cases:
        found = trace(tiny, tokens, PROMPT, STEPS, method, observe=True, record=("selections", "qk"))
        check_all(Simulator(found, psaw(*window) if window else None, **settings), kind)


@pytest.mark.parametrize("method", ["cis:critical=24,tau=0.5", "cpe:critical=24,start_layer=1", "oracle:critical=24"])
def test_what_decodes_sparsely_is_recorded_from_its_own_queries(tiny: Any, tokens: list[int], method: str) -> None:
    found = trace(tiny, tokens, PROMPT, STEPS, method, record=("selections", "qk"))
    mean = np.stack([_weights(found, step) for step in range(STEPS)])  # [S, N, Hkv, P + S]
    read = np.zeros((*mean.shape[:3], mean.shape[3] + 1), bool)
    np.put_along_axis(read, found.indices.astype(np.int64), True, -1)  # -1 lands in the extra column
    np.testing.assert_allclose(found.retained, (mean * read[..., :-1]).sum(-1), atol=TOLERANCE)
    assert (found.oracle_equal_keys > found.retained - 1e-3).all()


def test_recorded_keys_and_values_are_those_of_the_model(tiny: Any, tokens: list[int]) -> None:
    found = trace(tiny, tokens, PROMPT, STEPS, "dense", observe=True, record=("qkv",))
    with torch.no_grad():
        cache = tiny(torch.tensor([tokens]), use_cache=True).past_key_values
    for layer, stored in enumerate(cache.layers):
        np.testing.assert_allclose(found.k[layer], stored.keys[0], atol=1e-4)
        np.testing.assert_allclose(found.v[layer], stored.values[0], atol=1e-4)
    assert found.q is not None and np.isfinite(found.q).all()
    assert trace(tiny, tokens, PROMPT, 1, "dense", record=("qk",)).v is None


def _weights(found: Trace, step: int) -> np.ndarray:
    layers, heads, size, dim = found.k.shape
    q = found.q[step].reshape(layers, heads, -1, dim)
    logits = np.einsum("ngqd,ngld->ngql", q, found.k) * found.meta["scale"]["0"]
    logits[..., found.meta["prompt_tokens"] + step + 1 :] = -np.inf
    return softmax(logits).mean(2)


def test_smollm2_on_a_real_text(smollm2_path: Path, data_dir: Path) -> None:
    model, tokenizer = models.load(str(smollm2_path), dtype="float32")
    text = (data_dir / "wikitext2" / "wiki.test.raw").read_text(encoding="utf-8")[:8000]
    ids = tokenizer(text)["input_ids"]
    settings = {"critical": 88, "granularity": "query_head", "tau": 0.8}
    found = trace(model, ids, 600, 24, prehoc.CIS(**settings), observe=True, record=("selections", "qk"))
    assert found.retained.shape == (24, 30, 9)
    assert 0.1 < found.summary()["retrieval_ratio"] < 0.9
    check_all(Simulator(found, **settings), "cis")


def test_recording_changes_no_logit(tiny: Any, tokens: list[int]) -> None:
    ids = torch.tensor([tokens])
    for method in ("cis:critical=24,tau=0.5", "cpe:critical=24,start_layer=1,refresh=block", "dense"):
        outputs = []
        for watched in (False, True):
            with prehoc.sparsify(tiny, method) as session:
                if watched:
                    session.recorder = recorder.TraceRecorder(
                        session.plan, PROMPT, STEPS, 4, "kv_head", ("selections", "qk")
                    )
                outputs.append(torch.cat(list(forced_logits(tiny, ids, PROMPT))))
        assert torch.equal(*outputs), method
        assert outputs[0].shape == (STEPS + 1, 128)


def test_forced_logits_are_those_of_the_whole_text(tiny: Any, tokens: list[int]) -> None:
    with torch.no_grad():
        whole = tiny(torch.tensor([tokens])).logits[0, PROMPT - 1 :]
        with prehoc.sparsify(tiny, "dense"):
            stepwise = torch.cat(list(forced_logits(tiny, torch.tensor([tokens]), PROMPT)))
    torch.testing.assert_close(stepwise, whole, atol=1e-4, rtol=1e-4)


def test_dense_retains_everything_and_a_covering_budget_too(tiny: Any, tokens: list[int]) -> None:
    for method in ("dense", "etf:start_layer=1", "cis:budget=400"):
        found = trace(tiny, tokens, PROMPT, STEPS, method)
        assert (found.retained == 1).all()
        np.testing.assert_allclose(found.oracle, 1, atol=1e-6)
        assert (found.keys[:, 0, 0] == np.arange(PROMPT + 1, PROMPT + STEPS + 1)).all()
        assert not found.counted.any() and found.summary()["retrieval_ratio"] is None


def test_sliding_layers_are_kept_apart(tokens: list[int]) -> None:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        max_position_embeddings=256,
    )
    found = trace(
        Gemma3ForCausalLM(config).eval(), tokens, PROMPT, STEPS, "cis:critical=24", record=("selections", "qk")
    )
    assert found.meta["sliding_layers"] == [0, 2]
    assert (found.keys[:, [0, 2]] == -1).all() and np.isnan(found.retained[:, [0, 2]]).all()
    assert (found.keys[:, 1] > 0).all() and np.isfinite(found.retained[:, 1]).all()
    assert (found.indices[:, [0, 2]] == -1).all() and np.isnan(found.k[0]).all() and np.isfinite(found.k[1]).all()
    assert found.summary()["triples"] == STEPS


def test_a_saved_trace_is_the_same_trace(tiny: Any, tokens: list[int], tmp_path: Path) -> None:
    found = trace(tiny, tokens, PROMPT, STEPS, "cis:critical=24", record=("selections", "qk"))
    found.save(tmp_path / "a.npz")
    again = Trace.load(tmp_path / "a.npz")
    for field in dataclasses.fields(Trace):
        if field.name != "meta":
            np.testing.assert_array_equal(getattr(again, field.name), getattr(found, field.name))
    assert again.meta == json.loads(json.dumps(found.meta))
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"], "nothing else is left behind"
    totals = found.meta["totals"]["decode"]
    assert totals["keys_read"] == found.keys.sum() and totals["retrievals"] == found.retrieved.sum()
    assert totals["retrieval_ratio"] == pytest.approx(found.summary()["retrieval_ratio"])


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no trace"):
        Trace.load(tmp_path / "missing.npz")
    (tmp_path / "text.npz").write_text("no archive")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    for file in ("text.npz", "other.npz"):
        with pytest.raises(ValueError, match="is not a trace that prehoc wrote"):
            Trace.load(tmp_path / file)


@pytest.mark.parametrize(
    ("prompt", "steps", "count", "message"),
    [
        (0, 4, 10, "prompt_tokens=0 must be at least 1"),
        (4, 0, 10, "steps=0 must be at least 1"),
        (8, 4, 10, "the text has 10 tokens, but 8 prompt tokens \\+ 4 steps need 12"),
        (200, 57, 300, "200 prompt tokens \\+ 57 steps exceed the model's 256 positions"),
    ],
)
def test_bad_requests_are_refused_before_the_model_runs(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, prompt: int, steps: int, count: int, message: str
) -> None:
    monkeypatch.setattr(tiny.model, "forward", None)
    with pytest.raises(ValueError, match=message):
        trace(tiny, [1] * count, prompt, steps, "cis:critical=24")
    with pytest.raises(ValueError, match="unknown record 'qv'; did you mean 'qkv'"):
        trace(tiny, [1] * 20, 4, 4, "dense", record=("qv",))


def test_an_unwritable_target_is_refused(tiny: Any, tokens: list[int], tmp_path: Path) -> None:
    found = trace(tiny, tokens, PROMPT, 2, "dense")
    with pytest.raises(ValueError, match="there is no folder"):
        found.save(tmp_path / "none" / "a.npz")
    with pytest.raises(ValueError, match="is a folder"):
        found.save(tmp_path)


def test_a_model_that_does_not_say_how_many_positions_it_has() -> None:
    config = types.SimpleNamespace(hidden_size=8)
    config.get_text_config = lambda decoder: config
    assert position_limit(config) is None


def test_damaged_traces_are_refused_in_a_sentence(tiny: Any, tokens: list[int], tmp_path: Path) -> None:
    good = tmp_path / "good.npz"
    trace(tiny, tokens, PROMPT, STEPS, "cis:critical=24", record=("selections",)).save(good)
    with np.load(good) as file:
        arrays = dict(file)
    cases = {
        "cut": "is not a trace that prehoc wrote",
        "text": "it is no .npz file",
        "short": "indices has the shape",
        "lacking": "it lacks oracle",
    }
    (tmp_path / "cut.npz").write_bytes(good.read_bytes()[:4000])
    (tmp_path / "text.npz").write_text("no archive at all")
    np.savez(tmp_path / "short.npz", **{**arrays, "indices": arrays["indices"][:2]})
    np.savez(tmp_path / "lacking.npz", **{name: array for name, array in arrays.items() if name != "oracle"})
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message):
            Trace.load(tmp_path / f"{name}.npz")
