"""Where dense stops winning: what is measured, what is kept, and for whom it holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from bench_shapes import TINY
from prehoc.bench import breakeven, memory
from prehoc.bench.attention import Setup
from prehoc.bench.breakeven import BreakEven, break_even, load, measure, shape_of
from prehoc.bench.inputs import RandomInputs, Shape
from prehoc.methods import parse_method

SETUP = Setup((), torch.float32, "reference", steps=3, rounds=1, layers=1)
METHOD = parse_method("cis:budget=56,local=16")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREHOC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(memory, "last_cache_bytes", lambda device: 1)


@pytest.mark.parametrize(
    ("dense", "ours", "expected"),
    [
        ((1.0, 2.0, 4.0), (2.0, 1.5, 3.0), 200),
        ((1.0, 2.0, 4.0), (0.5, 1.5, 3.0), 100),
        ((1.0, 2.0, 4.0), (0.5, 2.5, 3.0), 400),  # a win that a longer length takes back does not count
        ((1.0, 2.0, 4.0), (0.5, 1.5, 4.0), None),
    ],
)
def test_the_length_from_which_on_the_method_wins(
    dense: tuple[float, ...], ours: tuple[float, ...], expected: int | None
) -> None:
    found = BreakEven("cis", (100, 200, 400), dense, ours, (0.5,) * 3)
    assert found.length == expected
    assert found.dense_wins(99) and found.dense_wins(399) == (expected in (400, None))
    assert found.dense_wins(10**6) == (expected is None)


def test_a_measurement_is_found_again_by_what_it_is_valid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(TINY, torch.float32, METHOD, "reference") is None
    found = break_even(TINY, RandomInputs(), METHOD, [96, 64], 1, SETUP)
    assert found.lengths == (64, 96) and found.method == "cis:budget=56,local=16"
    assert all(ms > 0 for ms in (*found.dense_ms, *found.method_ms))
    many = break_even(TINY, RandomInputs(), METHOD, [96], 8, SETUP)
    assert load(Shape("other name", 4, 4, 2, 8), torch.float32, METHOD, "reference") == found
    assert load(TINY, torch.float32, METHOD, "reference", batch=3) == found
    assert load(TINY, torch.float32, METHOD, "reference", batch=6) == many
    assert load(TINY, torch.bfloat16, METHOD, "reference") is None
    assert load(Shape("tiny", 4, 4, 2, 16), torch.float32, METHOD, "reference") is None
    assert load(TINY, torch.float32, parse_method("cis:budget=64,local=16"), "reference") is None
    other_gate = parse_method("cis:budget=56,local=16,gate=query")
    assert load(TINY, torch.float32, other_gate, "reference") is None, "by every key, whatever is the default"
    assert "gate" in breakeven.path().read_text()
    assert load(TINY, torch.float32, METHOD, "reference", device=torch.device("cuda")) is None
    assert load(TINY, torch.float32, METHOD, "cpu") is None, "torch's kernels do not decide for the C++ ones"
    again = break_even(TINY, RandomInputs(), METHOD, [80], 1, SETUP)
    assert load(TINY, torch.float32, METHOD, "reference") == again, "a new measurement takes the place of the old"
    monkeypatch.setattr(breakeven.provenance, "machine", lambda: {"cpu": "another"})
    assert load(TINY, torch.float32, METHOD, "reference") is None


def test_faults_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    breakeven.path().parent.mkdir()
    breakeven.path().write_text("{}")
    with pytest.raises(ValueError, match="is damaged .*; remove it and run prehoc bench break-even again"):
        load(TINY, torch.float32, METHOD, "reference")
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1)
    with pytest.raises(ValueError, match="length 64 with batch 2 needs 1.3 GiB of memory"):
        measure(TINY, RandomInputs(), METHOD, [64], 2, SETUP)


def test_the_shape_of_a_model() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2}
    assert shape_of(LlamaConfig(**sizes)) == Shape("model", 3, 8, 2, 8)
    assert shape_of(Qwen3Config(**sizes, head_dim=16)) == Shape("model", 3, 8, 2, 16)
