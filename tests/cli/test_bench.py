"""``prehoc bench decode`` on a tiny model; the bandwidth of the machine is made up."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.text import Text
from transformers import LlamaForCausalLM

from prehoc import cli, kernels
from prehoc.bench import decode, stream
from prehoc.cli import bench_decode


@pytest.fixture(scope="module")
def folder(tiny_llama: Callable[..., Path]) -> Path:
    return tiny_llama({"text.txt": 150, "short.txt": 100})


@pytest.fixture
def bench(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setattr(stream, "stream_bandwidth", lambda: 1e10)

    def call(*more: str) -> int:
        words = ["--model", str(folder), "--text-file", str(folder / "text.txt"), "--context", "60,100"]
        words += ["--methods", "cis:budget=48,local=16", "--rounds", "2", "--steps", "3", *more]
        monkeypatch.setattr(sys, "argv", ["prehoc", "bench", "decode", *words])
        try:
            cli.main()
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    return call


def test_prints_a_table_a_context_and_writes_the_document(
    bench: Callable[..., int], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "b.json"
    assert bench("--out", str(out)) == 0
    shown = capsys.readouterr().out
    assert "decode step, 1 x 60 tokens" in shown and "decode step, 1 x 100 tokens" in shown
    document = json.loads(out.read_text())
    assert [(cell["context"], [row["system"] for row in cell["rows"]]) for cell in document["cells"]] == [
        (length, ["sdpa", "dense", "cis:budget=48,local=16"]) for length in (60, 100)
    ]
    cell = document["cells"][0]
    assert cell["stream_bytes_per_second"] == 1e10
    assert document["settings"]["backend"] == kernels.resolve("auto", torch.device("cpu")) == cell["rows"][1]["backend"]
    for row in cell["rows"]:
        assert row["tokens_per_second"] == pytest.approx(1e3 / row["step_ms"])
        read = row.get("bytes_per_step", cell["rows"][1]["bytes_per_step"]) + cell["weight_bytes"]
        assert row["roofline_percent"] == pytest.approx(read / 1e10 / (row["step_ms"] / 1e3) * 100)
    assert cell["rows"][1]["times_dense"] == 1
    assert document["text"]["file"] == "text.txt" and document["command"].startswith("prehoc bench decode")
    assert [file.name for file in tmp_path.iterdir()] == ["b.json"]


@pytest.mark.parametrize("terminal", ["0", "1"])
def test_no_heading_and_no_number_is_cut(
    bench: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: str
) -> None:
    for name, value in (("TTY_COMPATIBLE", terminal), ("COLUMNS", "60"), ("NO_COLOR", "1"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    real = decode.bench_decode

    def large(*args: Any) -> Any:
        return [{**row, "step_ms_10": 12345.6, "step_ms_90": 23456.7} for row in real(*args)]

    monkeypatch.setattr(decode, "bench_decode", large)
    assert bench("--context", "60") == 0
    shown = Text.from_ansi(capsys.readouterr().out).plain
    assert "…" not in shown and "12345.6-23456.7" in shown and " cis:budget=48,local=16 " in shown
    words = {word for column in bench_decode.COLUMNS for word in column.split()}
    assert words <= set(re.split(r"[\s│┃]+", shown))
    assert ("% roofline" in shown) == (terminal == "0"), "headings break only where the terminal is narrow"


def test_every_rival_runs(bench: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    names = ["h2o:budget=64", "snapkv:budget=64", "quest:budget=64,dense_layers=0", "hshare-2:budget=64"]
    names.append("double_sparsity:budget=64")
    assert bench("--context", "100", "--methods", " ".join(names), "--json") == 0
    _, dense, *rivals = json.loads(capsys.readouterr().out)["cells"][0]["rows"]
    assert [row["system"] for row in rivals] == names
    for row in rivals:
        assert row["keys_per_head"] < dense["keys_per_head"] == row["visible_per_head"]
        assert row["prefill_of"] == ("" if row["system"].startswith(("h2o", "snapkv")) else "dense")


def test_an_interruption_keeps_the_finished_contexts(
    bench: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, out = decode.bench_decode, tmp_path / "b.json"

    def failing(model: Any, ids: Any, context: int, *more: Any) -> Any:
        if context == 100:
            raise OSError("the machine went away")
        return real(model, ids, context, *more)

    monkeypatch.setattr(decode, "bench_decode", failing)
    assert bench("--out", str(out)) == 2
    document = json.loads(out.read_text())
    assert [cell["context"] for cell in document["cells"]] == [60]
    monkeypatch.setattr(decode, "bench_decode", lambda *more: [] if more[2] == 60 else real(*more))
    assert bench("--out", str(out)) == 0
    resumed = json.loads(out.read_text())
    assert resumed["cells"][0] == document["cells"][0] and [cell["context"] for cell in resumed["cells"]] == [60, 100]


def test_a_model_that_does_not_say_how_many_positions_it_has(
    bench: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from prehoc.cli import _prompt

    real = _prompt.Reader.of.__func__  # type: ignore[attr-defined]

    def of(cls: Any, source: Any) -> Any:
        return _prompt.Reader(real(cls, source).tokenizer, None)

    monkeypatch.setattr(_prompt.Reader, "of", classmethod(of))
    assert bench("--context", "60", "--methods", "", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["cells"][0]["rows"]) == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--context", "60,x"), "--context '60,x' is not a list of numbers"),
        (("--context", "0"), "--context '0' has a number below 1"),
        (("--context", "60,140"), "the text has 150 tokens, but context 140 and 5 rounds of 3 steps need 155"),
        (("--context", "250"), "the model has 256 positions, but context 250 and 5 rounds of 3 steps need 265"),
        (("--methods", "ciss"), "unknown method 'ciss'; did you mean 'cis'"),
        (("--methods", "sdpa-statik"), "unknown system 'sdpa-statik'; did you mean 'sdpa-static'"),
        (("--methods", "packed:sdpa-statik"), "unknown system 'sdpa-statik'; did you mean 'sdpa-static'"),
        (("--batch", "0"), "--batch '0' has a number below 1"),
        (("--methods", "flex:cpe"), "cpe: budget=7 is too small"),
        (("--methods", "flex:cpe"), "it states no size, and then budget = context / 8 (here 60 / 8)"),
        (("--methods", "psaw:start_layer=7"), "start_layer=7"),
        (("--text-file", "no.txt"), "the text file 'no.txt' does not exist"),
        (("--out", "no/folder/b.json"), "there is no folder 'no/folder' to write 'b.json' to"),
        (("--out", "."), "'.' is a folder; give the name of a file"),
        (("--dtype", "float23"), "unknown dtype 'float23'"),
        (("--model", "smollm2-135m-instuct"), "did you mean 'smollm2-135m-instruct'"),
    ],
)
def test_errors_come_before_anything_is_measured(
    bench: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "forward", None)
    monkeypatch.setattr(stream, "stream_bandwidth", lambda: pytest.fail("the machine was measured before the fault"))
    assert bench(*more) == 2
    assert message in capsys.readouterr().err
