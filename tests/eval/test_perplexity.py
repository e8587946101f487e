"""Perplexity against a slow and obvious computation, on a tiny random Llama."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from prehoc.eval.perplexity import measure, paired_change, t_quantile
from prehoc.eval.prefill_search import GRIDS, coordinate_search, run
from prehoc.eval.prefill_sweep import Row, Sweep, both, spell
from prehoc.eval.prefix import DensePrefix
from prehoc.eval.windows import Windows, cut_windows, read_texts
from prehoc.methods import CPE, ETF, PSAW, Dense, parse_method

LAYERS, VOCABULARY, LENGTH, CONTINUATION = 6, 83, 150, 20
PSAW_TEXT = "psaw:start_layer=2,phi=0.1,alpha=1.0,sink=4,local=8"
ETF_TEXT = "etf:start_layer=3,psi=0.2,gamma=1.0"
BOTH_TEXT = "cpe:parts=psaw+etf,psaw_start_layer=2,phi=0.1,alpha=1,etf_start_layer=3,psi=0.2,gamma=1,sink=4,local=8"


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    made = LlamaForCausalLM(config).eval()
    for parameter in made.parameters():
        parameter.data.mul_(4)  # far from uniform, so that what a query sees changes its logits
    return made


@pytest.fixture(scope="module")
def windows() -> Tensor:
    return torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))


def slow_nll(model: Any, tokens: Tensor, hidden: Any = lambda layer, t: 0, sink: int = 0, frozen: Any = None) -> Tensor:
    """NLL of every token but the first of one window, with the layers written out and a full mask.

    `hidden(layer, t)` keys are hidden from a query that sees t; `frozen(layer)` leading rows keep the state they came with.
    """
    x = model.model.embed_tokens(tokens)[None]
    n = tokens.numel()
    position = torch.arange(n)
    rotary = model.model.rotary_emb(x, position[None])
    for number, layer in enumerate(model.model.layers):
        low = torch.tensor([hidden(number, t) for t in range(1, n + 1)])[:, None]
        seen = (position <= position[:, None]) & ((position >= low) | (position < sink))
        mask = torch.zeros(n, n).masked_fill(~seen, -math.inf)[None, None]
        out = layer(x, attention_mask=mask, position_embeddings=rotary, position_ids=position[None])
        if frozen is not None:
            out = torch.where((position < frozen(number))[None, :, None], x, out)
        x = out
    logp = model.lm_head(model.model.norm(x))[0].double().log_softmax(-1)
    return -logp[:-1].gather(1, tokens[1:, None])[:, 0]


def schedule(layer: int, start: int, base: float, t: int) -> int:
    share = 0.0 if layer <= start else 1 - base ** ((layer - start) / (LAYERS - start))
    return math.floor(share * t)


def psaw_hidden(layer: int, t: int) -> int:
    return max(0, min(schedule(layer, 2, 0.1, t), t - 8))


def etf_frozen(layer: int) -> int:
    prompt = LENGTH - CONTINUATION
    return min(schedule(layer, 3, 0.2, prompt), prompt - 1)


EXPECTED: dict[str, dict[str, Any]] = {
    "dense": {},
    PSAW_TEXT: {"hidden": psaw_hidden, "sink": 4},
    ETF_TEXT: {"frozen": etf_frozen},
    BOTH_TEXT: {"hidden": psaw_hidden, "sink": 4, "frozen": etf_frozen},
}


@pytest.mark.parametrize("method", list(EXPECTED))
@torch.no_grad()
def test_equals_the_slow_computation(model: Any, windows: Tensor, method: str) -> None:
    found = measure(model, method, windows, CONTINUATION)
    slow = torch.stack([slow_nll(model, row, **EXPECTED[method]) for row in windows])
    assert found.continuation_nll == pytest.approx(slow[:, -CONTINUATION:].mean(1).tolist(), abs=2e-5)
    if "frozen" in EXPECTED[method]:
        assert found.window_nll is None
    else:
        assert found.window_nll == pytest.approx(slow.mean(1).tolist(), abs=2e-5)
    if method != "dense":
        dense = measure(model, "dense", windows, CONTINUATION)
        assert max(abs(a - b) for a, b in zip(found.continuation_nll, dense.continuation_nll, strict=True)) > 1e-2


@torch.no_grad()
def test_dense_is_one_full_forward(model: Any, windows: Tensor) -> None:
    logp = model(windows).logits.double().log_softmax(-1)
    full = -logp[:, :-1].gather(2, windows[:, 1:, None])[..., 0]
    found = measure(model, "dense", windows, CONTINUATION)
    assert found.window_nll == pytest.approx(full.mean(1).tolist(), abs=1e-5)
    assert found.continuation_nll == pytest.approx(full[:, -CONTINUATION:].mean(1).tolist(), abs=1e-5)
    assert found.operations == found.operations_dense > 0


@pytest.mark.parametrize("method", list(EXPECTED))
def test_batched_equals_one_by_one(model: Any, windows: Tensor, method: str) -> None:
    together = measure(model, method, windows, CONTINUATION)
    alone = [measure(model, method, row[None], CONTINUATION) for row in windows]
    assert together.continuation_nll == pytest.approx([x.continuation_nll[0] for x in alone], abs=1e-5)
    assert together.operations == sum(x.operations for x in alone)


@pytest.mark.parametrize("block", [7, CONTINUATION, 64])
@pytest.mark.parametrize("method", list(EXPECTED))
def test_decoding_blocks_changes_nothing(model: Any, windows: Tensor, method: str, block: int) -> None:
    single = measure(model, method, windows, CONTINUATION)
    several = measure(model, method, windows, CONTINUATION, block=block)
    assert several.continuation_nll == pytest.approx(single.continuation_nll, abs=1e-5)
    assert several.window_nll == (single.window_nll and pytest.approx(single.window_nll, abs=1e-5))
    assert (several.operations, several.operations_dense) == (single.operations, single.operations_dense)


@pytest.mark.parametrize("kv", ["project", "share"])
def test_the_shared_prefix_changes_nothing(model: Any, windows: Tensor, kv: str) -> None:
    prefix = DensePrefix(model, [2, 3])
    assert not prefix.ready
    measure(model, "dense", windows, CONTINUATION, prefix=prefix)
    assert prefix.ready
    other = DensePrefix(model, [2, 3])
    other.compute(model, windows[:, :-CONTINUATION])
    for method in (PSAW_TEXT, f"{ETF_TEXT},kv={kv}", f"{BOTH_TEXT},kv={kv}"):
        plain = measure(model, method, windows, CONTINUATION)
        for shared in (prefix, other):
            found = measure(model, method, windows, CONTINUATION, prefix=shared)
            assert found.continuation_nll == plain.continuation_nll
            assert (found.operations, found.operations_dense) == (plain.operations, plain.operations_dense)
    assert not any("forward" in vars(layer) for layer in model.model.layers)


def test_a_start_layer_that_was_not_kept_runs_in_full(model: Any, windows: Tensor) -> None:
    prefix = DensePrefix(model, [4])
    prefix.compute(model, windows[:, :-CONTINUATION])
    found = measure(model, PSAW_TEXT, windows, CONTINUATION, prefix=prefix)
    assert found.continuation_nll == measure(model, PSAW_TEXT, windows, CONTINUATION).continuation_nll


def test_sliding_layers_share_nothing(windows: Tensor) -> None:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=16,
        max_position_embeddings=256,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    gemma = Gemma3ForCausalLM(config).eval()
    prefix = DensePrefix(gemma, [1])
    prefix.compute(gemma, windows[:, :-CONTINUATION])
    assert not prefix.ready
    method = "etf:start_layer=1,psi=0.2"
    found = measure(gemma, method, windows, CONTINUATION, prefix=prefix)
    assert found == measure(gemma, method, windows, CONTINUATION) or found.continuation_nll == pytest.approx(
        measure(gemma, method, windows, CONTINUATION).continuation_nll
    )


def test_lengths_that_do_not_fit_are_refused(model: Any, windows: Tensor) -> None:
    with pytest.raises(ValueError, match="window=300 exceeds the model's 256 positions"):
        measure(model, "dense", torch.zeros(1, 300, dtype=torch.long), 10)
    with pytest.raises(ValueError, match="continuation=149 leaves no prompt in a window of 150; give at most 148"):
        measure(model, "dense", windows, LENGTH - 1)
    with pytest.raises(ValueError, match="continuation=0 must be at least 1"):
        measure(model, "dense", windows, 0)
    with pytest.raises(ValueError, match="cis selects at every decode step; set block to 1"):
        measure(model, "cis:critical=16", windows, CONTINUATION, block=4)


def test_a_block_that_does_not_go_with_the_method_is_refused_before_the_model_runs(
    model: Any, windows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "forward", None)
    monkeypatch.setattr(model.model, "forward", None)
    with pytest.raises(ValueError, match="block=4: cpe selects at every decode step; set block to 1"):
        measure(model, "cpe:budget=64", windows, CONTINUATION, block=4)


def test_paired_change() -> None:
    assert t_quantile(15) == pytest.approx(2.1314, abs=1e-4)
    assert t_quantile(3) == pytest.approx(3.1824, abs=1e-4)
    change = paired_change([2.0, 3.1, 4.2, 3.0], [2.0, 3.0, 4.0, 3.1])
    # d = 0, .1, .2, -.1: mean .05, s = .1291, half = 3.1824 s / 2
    assert (change.mean, change.low, change.high) == pytest.approx(
        tuple(math.expm1(x) for x in (0.05, 0.05 - 0.20543, 0.05 + 0.20543)), abs=1e-4
    )
    assert paired_change([1.0], [1.0]).high == math.inf
    with pytest.raises(ValueError, match="1 windows do not pair up with 2"):
        paired_change([1.0], [1.0, 2.0])


class Words:
    """A tokenizer: one token a word, and one special token in front."""

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        words = [len(word) for word in text.split()]
        return {"input_ids": [7, *words] if add_special_tokens else words}


def test_windows_are_cut_apart_and_begin_with_the_special_tokens(tmp_path: Path) -> None:
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file in files:
        file.write_text(" ".join("x" * (i % 50 + 1) for i in range(100)))
    cut = cut_windows(Words(), read_texts(files, 4), 4, 11)
    assert cut.places == (("a.txt", 0), ("a.txt", 90), ("b.txt", 0), ("b.txt", 90))
    assert cut.tokens.shape == (4, 11)
    assert cut.tokens[1].tolist() == [7, *range(41, 51)]
    assert [text["file"] for text in cut.texts] == ["a.txt", "b.txt"]
    with pytest.raises(ValueError, match="a.txt has 100 tokens, too short for 2 windows of 60"):
        cut_windows(Words(), read_texts(files, 4), 4, 60)
    with pytest.raises(ValueError, match="windows=3 cannot be shared equally by 2 text files"):
        read_texts(files, 3)
    for name, content in (("b.txt", b""), ("b.txt", b"caf\xe9"), ("c.txt", None)):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"the text file '.*{name}' (is empty|is not UTF-8|does not exist)"):
            read_texts([files[0], tmp_path / name], 2)


def sweep_of(model: Any, windows: Tensor, part: Path, continuation: int = CONTINUATION) -> Sweep:
    return Sweep(model, "tiny", Windows(windows, (("t", 0),) * 3, ()), continuation, 2, part, block=64)


def test_a_sweep_resumes_and_measures_nothing_twice(model: Any, windows: Tensor, tmp_path: Path) -> None:
    part = tmp_path / "x.part.jsonl"
    method = parse_method(PSAW_TEXT)
    first = sweep_of(model, windows, part)
    row = first.row(method)
    assert first.measured_batches == 4  # two batches, dense beside
    again = sweep_of(model, windows, part)
    assert again.row(method) == row and again.measured_batches == 0
    # the last line was cut short: its batch, and no other, is measured again
    lines = part.read_text().splitlines()
    part.write_text("\n".join([*lines[:-1], lines[-1][:40]]) + "\n")
    third = sweep_of(model, windows, part)
    assert third.row(method).measured.continuation_nll == row.measured.continuation_nll
    assert third.measured_batches == 1
    # another continuation is another run
    other = sweep_of(model, windows, part, continuation=10)
    other.row(Dense())
    assert other.measured_batches == 2


def test_a_run_lists_every_finished_setting(model: Any, windows: Tensor, tmp_path: Path) -> None:
    part = tmp_path / "x.part.jsonl"
    run(sweep_of(model, windows, part), [parse_method(ETF_TEXT)], [], 0.01)
    found = run(sweep_of(model, windows, part), [parse_method(PSAW_TEXT)], [], 0.01)
    assert [row["method"].split(":")[0] for row in found["rows"]] == ["dense", "etf", "psaw"]
    dense, etf, psaw = found["rows"]
    assert dense["saved"] == 0 and etf["saved"] > 0
    assert etf["window"] is None and len(psaw["window_nll"]) == 3
    change = paired_change(psaw["window_nll"], dense["window_nll"])
    assert psaw["window"]["high"] == pytest.approx(change.high, abs=1e-5)


def test_the_spelling_names_the_same_method() -> None:
    pair = both(PSAW(phi=0.3, start_layer=4), ETF(psi=0.2, start_layer=0.9, kv="share"))
    for method in (Dense(), PSAW(phi=0.2, start_layer=3), ETF(start_layer=0.9), pair):
        assert parse_method(spell(method)) == method
    assert "start_layer=None" not in spell(CPE(parts=("psaw", "etf")))
    with pytest.raises(ValueError, match="selects in decode too"):
        spell(CPE())
    with pytest.raises(ValueError, match="does not prune a prefill"):
        spell(parse_method("cis"))


def test_the_search_takes_one_coordinate_at_a_time() -> None:
    asked: list[PSAW] = []

    def evaluate(method: Any) -> Any:
        asked.append(method)
        loss = 0.004 * (1 - method.start_layer) / (method.phi**0.2) * method.alpha**0.3

        class _Row:
            continuation = paired_change([loss, loss], [0.0, 0.0])

        return _Row()

    found, good = coordinate_search(evaluate, PSAW(phi=0.7, alpha=1.5, start_layer=0.5), GRIDS["psaw"], 0.003)
    assert good and isinstance(found, PSAW)
    # every value that prunes more, the other coordinates held, is over the limit
    for key, values in GRIDS["psaw"].items():
        for value in values[: values.index(getattr(found, key))]:
            row: Row = evaluate(PSAW(**{**vars(found), key: value}))
            assert row.continuation.high > 0.003
    _, good = coordinate_search(evaluate, PSAW(start_layer=0.5), GRIDS["psaw"], -1.0)
    assert not good
