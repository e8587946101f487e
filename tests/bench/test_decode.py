"""The benchmark of decode steps: what it runs, in which order, and what its rows add up to; never how long it took."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from prehoc.bench import decode
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


def test_the_order_rotates_and_every_system_reads_the_same_tokens(
    model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[tuple[str, str, tuple[int, ...]]] = []
    real = decode._decode

    def spy(model: Any, system: Any, span: torch.Tensor, kind: str, *more: Any) -> None:
        turns.append((system.name, kind, tuple(span[0].tolist())))
        real(model, system, span, kind, *more)

    monkeypatch.setattr(decode, "_decode", spy)
    bench_decode(model, ids, CONTEXT, METHODS[:1], ROUNDS, STEPS)
    names = ["sdpa", "dense", METHODS[0]]
    assert [kind for _, kind, _ in turns[::3]] == ["warm", "timed", "timed", "parts", "audit"]
    for turn in range(ROUNDS + 3):
        now, begin = turns[3 * turn : 3 * turn + 3], CONTEXT + turn * STEPS
        assert [name for name, _, _ in now] == names[turn % 3 :] + names[: turn % 3]
        assert {span for _, _, span in now} == {tuple(ids[0, begin : begin + STEPS].tolist())}


def test_the_clock_waits_for_the_device(model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(decode, "_wait", lambda device: waited.append(device.type))
    bench_decode(model, ids, CONTEXT, [], ROUNDS, STEPS)
    assert len(waited) == 2 * (1 + (ROUNDS + 3) * STEPS), "once per prefill and per step of the two systems"


def test_a_model_of_another_shape(model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither ``model.model`` nor ``logits_to_keep`` are part of what transformers promises."""
    full, real = model.forward, decode.last_only

    def forward(input_ids: Any, use_cache: bool, past_key_values: Any = None, cache: Any = None, **more: Any) -> Any:
        assert "logits_to_keep" not in more
        return full(input_ids=input_ids, use_cache=use_cache, **{key: past_key_values or cache}, **more)

    key = decode.cache_key({}, model)
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
