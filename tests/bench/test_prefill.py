"""The benchmark of prompts: what it reads, in which order, and the operations of its rows; never how long it took."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from prehoc import cli
from prehoc.bench import prefill
from prehoc.bench.prefill import bench_prefill

METHODS = ["psaw:phi=0.3,start_layer=0.25", "etf:psi=0.3,start_layer=0.25"]
LENGTH = 200


@pytest.fixture(scope="module")
def folder(tiny_llama: Callable[..., Path]) -> Path:
    return tiny_llama({"text.txt": 220}, layers=4)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.arange(LENGTH)[None] % 60 + 1


def test_rows_and_their_operations(model: Any, ids: torch.Tensor) -> None:
    rows = bench_prefill(model, ids, LENGTH, METHODS, rounds=2, batch=2, backend="reference")
    assert [row["system"] for row in rows] == ["sdpa", "dense", *METHODS]
    stock, dense, psaw, etf = rows
    for row in rows:
        assert (row["length"], row["batch"], row["rounds"]) == (LENGTH, 2, 2)
        assert 0 < row["seconds_10"] <= row["seconds"] <= row["seconds_90"]
        assert row["times_sdpa"] == stock["seconds"] / row["seconds"]
        assert row["times_dense"] == dense["seconds"] / row["seconds"]
        assert row["tokens_per_second"] == LENGTH * 2 / row["seconds"]
    assert "operations" not in stock
    weights = sum(p.numel() for layer in model.model.layers for p in layer.parameters() if p.dim() == 2)
    pairs = 4 * LENGTH * (LENGTH + 1) // 2
    expected = 2 * (2 * LENGTH * weights + 4 * pairs * 4 * 8)  # two rows; four heads of eight
    assert dense["operations"] == dense["operations_dense"] == expected and dense["pairs"] == 2 * pairs
    for row in (psaw, etf):
        assert row["operations"] < row["operations_dense"] == expected
    assert psaw["pairs"] < psaw["pairs_dense"]


def test_the_order_rotates_and_the_first_round_warms_up(
    model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, clock = [], iter(range(1, 100))

    def read(model: Any, system: Any, found: torch.Tensor, backend: str | None) -> float:
        turns.append(system.name)
        assert found.shape == (1, 150)
        return float(next(clock))

    monkeypatch.setattr(prefill, "_read", read)
    rows = bench_prefill(model, ids, 150, METHODS[:1], rounds=2)
    assert turns == ["sdpa", "dense", METHODS[0], "dense", METHODS[0], "sdpa", METHODS[0], "sdpa", "dense"]
    assert [row["seconds"] for row in rows] == [(6 + 8) / 2, (4 + 9) / 2, (5 + 7) / 2]


@pytest.mark.parametrize(
    ("length", "methods", "message"),
    [
        (201, [], "the text has 200 tokens, but --length asks for 201"),
        (200, ["psaww"], "unknown method 'psaww'; did you mean 'psaw'"),
        (200, ["etf:start_layer=7"], "start_layer=7"),
    ],
)
def test_errors_come_before_anything_is_run(
    model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch, length: int, methods: list[str], message: str
) -> None:
    monkeypatch.setattr(model, "forward", None)
    with pytest.raises(ValueError, match=message):
        bench_prefill(model, ids, length, methods)


def call(monkeypatch: pytest.MonkeyPatch, folder: Path, *more: str) -> int:
    words = ["--model", str(folder), "--text-file", str(folder / "text.txt"), "--rounds", "1", *more]
    monkeypatch.setattr(sys, "argv", ["prehoc", "bench", "prefill", *words])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_the_command_prints_a_table_a_length_and_writes_the_document(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.json"
    assert call(monkeypatch, folder, "--length", "100,200", "--out", str(out)) == 0
    shown = capsys.readouterr().out
    assert "prompt of 100 tokens, batch 1" in shown and "prompt of 200 tokens, batch 1" in shown
    document = json.loads(out.read_text())
    names = ["sdpa", "dense", "psaw", "etf", "cpe:parts=psaw+etf"]
    assert [(row["length"], row["system"]) for row in document["rows"]] == [
        (n, name) for n in (100, 200) for name in names
    ]
    assert document["benchmark"] == "prefill" and document["command"].startswith("prehoc bench prefill")
    assert document["text"]["file"] == "text.txt" and document["dtype"] == "float32"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--length", "240"), "the text has 220 tokens, but --length asks for 240"),
        (("--length", "300"), "the model has 256 positions, but --length asks for 300"),
        (("--length", "100", "--methods", "etff"), "unknown method 'etff'; did you mean 'etf'"),
        (("--length", "100", "--out", "no/p.json"), "there is no folder 'no'"),
    ],
)
def test_the_command_finds_faults_first(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "forward", None)
    assert call(monkeypatch, folder, *more) == 2
    assert message in capsys.readouterr().err
