"""The benchmark of decode steps: what it runs, in which order, and what its rows add up to; never how long it took."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from prehoc.bench import breakeven, decode, systems
from prehoc.bench.breakeven import BreakEven
from prehoc.bench.decode import bench_decode, needed

CONTEXT, ROUNDS, STEPS = 60, 2, 3
METHODS = ["cis:budget=48,local=16", "cpe:budget=48,local=16"]


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_llama({})).eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.arange(needed(CONTEXT, ROUNDS, STEPS))[None] % 60 + 1


def test_rows_and_their_books(model: Any, ids: torch.Tensor) -> None:
    rows = bench_decode(model, ids, CONTEXT, METHODS, ROUNDS, STEPS, batch=2, backend="reference")
    assert [row["system"] for row in rows] == ["sdpa", "dense", *METHODS]
    for row in rows:
        assert (row["context"], row["batch"], row["steps"]) == (CONTEXT, 2, ROUNDS * STEPS)
        assert 0 < row["step_ms_10"] <= row["step_ms"] <= row["step_ms_90"] and row["prefill_seconds"] > 0
    stock, dense, *sparse = rows
    assert "keys_per_head" not in stock
    assert [row["prefill_of"] for row in rows] == ["", "", "dense", ""], "CIS prunes no prompt, CPE does"
    assert all(row["dense_step_ms"] == dense["step_ms"] and row["cache_bytes"] > 0 for row in rows)
    # warm-up, timed rounds, parts and audit each decode STEPS tokens behind the prompt
    visible = CONTEXT + (1 + (ROUNDS + 3) * STEPS) / 2
    for row in (dense, *sparse):
        assert row["visible_per_head"] == pytest.approx(visible) and row["backend"] == "reference"
        assert all(row[f"{part}_ms"] >= 0 for part in ("attention", "selection", "rest"))
    assert dense["keys_per_head"] == dense["visible_per_head"]
    assert dense["bytes_per_step"] == dense["dense_bytes_per_step"]
    for row in sparse:
        assert row["keys_per_head"] < row["visible_per_head"]
        assert row["bytes_per_step"] != row["dense_bytes_per_step"] == dense["bytes_per_step"]


def test_methods_that_look_at_the_prompt_read_it_themselves(
    model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = ((1.0, 1.0), (0.5, 0.5))
    monkeypatch.setattr(breakeven, "load", lambda *args, **more: BreakEven("cpe", (16, 32), *times, (None, None)))
    own = ["h2o:budget=48,local=16", "snapkv:budget=48,local=16", "auto:budget=48,local=16", "cpe:budget=48,local=16"]
    shared = [METHODS[0], f"packed:{METHODS[0]}"]
    rows = {row["system"]: row for row in bench_decode(model, ids, CONTEXT, [*own, *shared], ROUNDS, STEPS)}
    assert [rows[name]["prefill_of"] for name in own] == [""] * 4
    assert [rows[name]["prefill_of"] for name in shared] == ["dense"] * 2, "packed layers change no prompt"
    assert rows[own[0]]["keys_per_head"] == 48
    assert rows[own[0]]["cache_bytes"] < rows["dense"]["cache_bytes"]
    assert rows[own[2]]["keys_per_head"] == rows[own[3]]["keys_per_head"], "auto prunes this prompt, as cpe does"


def test_the_order_rotates_and_every_system_reads_the_same_tokens(
    model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[tuple[str, str, tuple[int, ...]]] = []
    real = systems.System.decode

    def spy(self: Any, model: Any, span: torch.Tensor, kind: str, *more: Any) -> None:
        turns.append((self.name, kind, tuple(span[0].tolist())))
        real(self, model, span, kind, *more)

    monkeypatch.setattr(systems.System, "decode", spy)
    bench_decode(model, ids, CONTEXT, METHODS[:1], ROUNDS, STEPS)
    names = ["sdpa", "dense", METHODS[0]]
    assert [kind for _, kind, _ in turns[::3]] == ["warm", "timed", "timed", "parts", "audit"]
    for turn in range(ROUNDS + 3):
        now, begin = turns[3 * turn : 3 * turn + 3], CONTEXT + turn * STEPS
        assert [name for name, _, _ in now] == names[turn % 3 :] + names[: turn % 3]
        assert {span for _, _, span in now} == {tuple(ids[0, begin : begin + STEPS].tolist())}


def test_caches_that_do_not_fit_together_run_in_groups(model: Any, ids: torch.Tensor) -> None:
    names = ["streaming:budget=48", *METHODS, "sdpa-static"]
    whole = bench_decode(model, ids, CONTEXT, names, ROUNDS, STEPS)
    one = decode.cache_bytes(model, 1, needed(CONTEXT, ROUNDS, STEPS))
    parts = bench_decode(model, ids, CONTEXT, names, ROUNDS, STEPS, room=3 * one)
    assert [row["system"] for row in parts] == [row["system"] for row in whole] == ["sdpa", "dense", *names]
    by_name = {row["system"]: row for row in parts}
    assert len({row["dense_step_ms"] for row in parts}) == 3, "dense runs beside each group of two"
    for row in whole:  # the books do not know of groups: dense begins anew at the prompt each time
        for key in ("keys_per_head", "bytes_per_step", "visible_per_head", "retained_mass"):
            assert by_name[row["system"]].get(key) == row.get(key)
    with pytest.raises(ValueError, match="two caches of 0.0 GiB do not fit into the 0.0 GiB at hand"):
        bench_decode(model, ids, CONTEXT, names, ROUNDS, STEPS, room=one)


def test_every_row_reads_a_span_of_its_own_where_the_text_is_long_enough() -> None:
    text = torch.arange(20)[None]
    assert decode.batch_rows(text, 10, 2).tolist() == [list(range(10)), list(range(10, 20))]
    assert decode.batch_rows(text, 11, 2).tolist() == [list(range(11))] * 2


def test_other_ways_to_attend_give_the_same_logits(model: Any, ids: torch.Tensor) -> None:
    """FlexAttention over a method's selection, a static cache, a compiled forward, packed layers: the same computation."""
    logits = {}
    sparse = ("cis:budget=48,local=16", "flex:cis:budget=48,local=16", "packed:cis:budget=48,local=16")
    for name in ("dense", "sdpa-static", "compiled:dense", "packed:sdpa-static", *sparse):
        system = systems.System.of(name, CONTEXT)
        seen: list[torch.Tensor] = []
        hook = model.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out.logits[:, -1].clone()))
        with torch.inference_mode():
            system.read_prompt(model, ids[:, :CONTEXT], 75, "reference")
            system.decode(model, ids[:, CONTEXT : CONTEXT + 4], "timed", "reference", 0)
        hook.remove()
        logits[name] = torch.stack(seen)
        assert len(system.steps) == 4 and len(seen) == 5
        assert all("forward" not in module.__dict__ for module in model.modules())
    plain, flex, packed = (logits[name] for name in sparse)
    for name in ("sdpa-static", "compiled:dense", "packed:sdpa-static"):
        assert torch.allclose(logits["dense"], logits[name], atol=1e-4)
    assert not torch.equal(plain, packed), "packed products round otherwise"
    assert torch.allclose(plain, packed, atol=1e-4)
    assert torch.allclose(plain, flex, atol=1e-4) and not torch.allclose(plain, logits["dense"], atol=1e-4)


def test_the_clock_waits_for_the_device(model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(systems, "wait", lambda device: waited.append(device.type))
    bench_decode(model, ids, CONTEXT, [], ROUNDS, STEPS)
    assert len(waited) == 2 * (1 + (ROUNDS + 3) * STEPS), "once per prefill and per step of the two systems"


def test_a_model_of_another_shape(model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither ``model.model`` nor ``logits_to_keep`` are part of what transformers promises."""
    full, real = model.forward, systems.last_only

    def forward(input_ids: Any, use_cache: bool, past_key_values: Any = None, cache: Any = None, **more: Any) -> Any:
        assert "logits_to_keep" not in more
        return full(input_ids=input_ids, use_cache=use_cache, **{key: past_key_values or cache}, **more)

    key = systems.cache_key({}, model)
    if key == "past_key_values":
        forward.__signature__ = _without(forward, "cache")  # type: ignore[attr-defined]
    monkeypatch.setattr(model, "forward", forward)
    assert real(model) == {}
    assert len(bench_decode(model, ids, CONTEXT, [], ROUNDS, STEPS)) == 2


def _without(function: Any, name: str) -> Any:
    import inspect

    signature = inspect.signature(function)
    return signature.replace(parameters=[p for p in signature.parameters.values() if p.name != name])


@pytest.mark.parametrize(
    ("tokens", "methods", "message"),
    [
        (74, [], "the text has 74 tokens, but context 60 and 5 rounds of 3 steps need 75"),
        (75, ["ciss"], "unknown method 'ciss'; did you mean 'cis'"),
        (75, ["psaw:start_layer=7"], "start_layer=7"),
    ],
)
def test_errors_come_before_anything_is_run(
    model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch, tokens: int, methods: list[str], message: str
) -> None:
    monkeypatch.setattr(model, "forward", None)
    with pytest.raises(ValueError, match=message):
        bench_decode(model, ids[:, :tokens], CONTEXT, methods, ROUNDS, STEPS)
    assert getattr(model, "_prehoc_session", None) is None
