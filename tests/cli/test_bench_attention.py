"""``prehoc bench attention`` and ``bench break-even`` on a tiny shape; the bandwidth of the machine is made up."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench_shapes import TINY, record
from prehoc import cli
from prehoc.bench import attention, breakeven, inputs, memory, refcheck, rows, stream
from prehoc.plot.report import report
from prehoc.plot.runs import read_run

METHOD = "cis-8:budget=56,local=16"


@pytest.fixture(scope="module")
def traced(tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "t.npz"
    record(tiny_llama, 126, 10).save(path)
    return path


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    monkeypatch.setattr(stream, "stream_bandwidth", lambda: 1e15)
    monkeypatch.setattr(memory, "last_cache_bytes", lambda device: 1)
    monkeypatch.setattr(rows, "decode_flex", _no_compiler)
    monkeypatch.setitem(inputs.SHAPES, "tiny", TINY)
    monkeypatch.setenv("PREHOC_CACHE", str(tmp_path / "cache"))

    def call(command: str, *more: str) -> int:
        words = {"--shape": "tiny", "--batch": "2", "--length": "128", "--methods": METHOD, "--steps": "8"}
        words |= {"--rounds": "1", "--layers": "2", "--dtype": "float32", "--backend": "reference"}
        plain = [word for pair in words.items() if pair[0] not in more for word in pair]
        monkeypatch.setattr(sys, "argv", ["prehoc", "bench", command, *plain, *more])
        try:
            cli.main()
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    return call


def _no_compiler(*args: Any) -> None:
    raise RuntimeError("no compiler here")


def test_prints_a_table_a_cell_and_writes_the_document(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.json"
    assert bench("attention", "--length", "128,256", "--batch", "1,2", "--refcheck", "--out", str(out)) == 0
    shown = capsys.readouterr().out
    for batch in (1, 2):
        for length in (128, 256):
            assert f"tiny (4/2 x 8), batch {batch} x {length}; 2 layers" in shown
    assert "did not run: RuntimeError: no compiler here" in shown
    document = json.loads(out.read_text())
    assert document["benchmark"] == "attention" and document["command"].startswith("prehoc bench attention")
    assert document["stream_bytes_per_second"] == 1e15 and document["invalid"] == []
    assert document["settings"]["inputs"] == [{"inputs": "random", "seed": 0}] and document["machine"]["cpu"]
    assert {(cell["batch"], cell["length"]) for cell in document["cells"]} == {(1, 128), (1, 256), (2, 128), (2, 256)}
    for cell in document["cells"]:
        assert cell["shape"] == {"name": "tiny", "layers": 4, "heads": 4, "kv_heads": 2, "dim": 8}
        assert [row["row"] for row in cell["rows"]] == ["sdpa-flash", "sdpa-math", "dense", f"flex ({METHOD})", METHOD]
        dense, ours = cell["rows"][2], cell["rows"][4]
        assert dense["times_dense"] == 1 and ours["times_sdpa"] > 0 and ours["retrieval_ratio"] == 1 / 8
        assert ours["refcheck"]["overlap"] == 1 and ours["bytes_read"] < dense["bytes_read"]


def test_a_run_goes_on_where_it_was(
    bench: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, ran = tmp_path / "a.json", []
    real = attention.bench_cell

    def cell(one: Any, *more: Any, **named: Any) -> Any:
        if one.length == 256 and not ran[1:]:
            ran.append("failed")
            raise OSError("the machine went away")
        ran.append(one.length)
        return real(one, *more, **named)

    monkeypatch.setattr(attention, "bench_cell", cell)
    options = ("--length", "128,256", "--out", str(out))
    assert bench("attention", *options) == 2
    before = json.loads(out.read_text())["cells"]
    assert [one["length"] for one in before] == [128] and ran == [128, "failed"]
    capsys.readouterr()
    assert bench("attention", *options, "--json") == 0
    shown = capsys.readouterr()
    assert "1 finished cells of" in shown.err and ran == [128, "failed", 256]
    document = json.loads(shown.out)
    assert document == json.loads(out.read_text()) and document["cells"][0] == before[0]
    assert bench("attention", *options, "--steps", "16") == 2
    assert "another settings 'steps' (8)" in capsys.readouterr().err


def test_a_rate_above_memory_makes_the_run_invalid(
    bench: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(stream, "stream_bandwidth", lambda: 1.0)
    out = tmp_path / "a.json"
    assert bench("attention", "--out", str(out)) == 1
    assert "THIS RUN IS INVALID" in capsys.readouterr().err
    assert any(line.startswith("dense at tiny 2 x 128") for line in json.loads(out.read_text())["invalid"])


def test_a_failed_refcheck_ends_the_run(
    bench: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(refcheck, "OVERLAP", 1.01)
    out = tmp_path / "a.json"
    assert bench("attention", "--refcheck", "--out", str(out)) == 1
    assert "refcheck failed" in capsys.readouterr().err and not out.exists()


def test_traced_inputs(
    bench: Callable[..., int], traced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--inputs", str(traced), "--shape", "traced,tiny", "--refcheck", "--json")
    assert bench("attention", *options) == 0
    document = json.loads(capsys.readouterr().out)
    assert [cell["shape"]["name"] for cell in document["cells"]] == ["traced", "tiny"]
    assert document["cells"][0]["layers"] == [0, 1] and document["cells"][1]["layers"] == [1, 3]
    assert document["settings"]["inputs"][0]["inputs"] == "t.npz" and document["settings"]["inputs"][0]["tokens"] == 136
    assert bench("attention", "--inputs", str(traced), "--length", "137") == 2
    assert "length 137 is above the 136 tokens of the trace 't.npz'" in capsys.readouterr().err


def test_break_even_is_kept_for_auto_and_written(
    bench: Callable[..., int],
    traced: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = iter([(1.0, 2.0), (2.0, 2.5), (4.0, 3.0), (8.0, 3.5)])

    def cell(one: Any, source: Any, setup: Any, report: Any, given: Any) -> dict[str, Any]:
        assert [row.name for row in given] == ["dense", "cis:budget=56,local=16,gate=query"]
        dense, ours = next(times)
        return {"rows": [{"ms": dense}, {"ms": ours, "retrieval_ratio": 0.25}]}

    monkeypatch.setattr(breakeven, "bench_cell", cell)
    out = tmp_path / "b.json"
    options = ("--inputs", str(traced), "--length", "100,110,120,130", "--shape", "traced", "--out", str(out))
    assert bench("break-even", *options) == 0
    shown = capsys.readouterr()
    assert "faster than dense from 120 tokens on" in shown.out and "2.29" in shown.out
    assert str(breakeven.path()) in shown.err
    run = read_run(out)
    (found,) = run.document["methods"]
    assert run.kind == "break-even" and found["length"] == 120 and found["method_ms"] == [2.0, 2.5, 3.0, 3.5]
    assert run.document["command"].startswith("prehoc bench break-even") and run.document["settings"]["steps"] == 8
    page = report([run])
    assert "Faster from 120 tokens on" in page and "2.29" in page
    assert bench("break-even", *options[:-1], str(tmp_path / "none" / "b.json")) == 2
    assert "create it first" in capsys.readouterr().err


def test_break_even_is_asked_for_a_device_that_is_there(
    bench: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(breakeven, "bench_cell", None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench("break-even", "--device", "cuda") == 2
    assert "device 'cuda' is not available to torch here; use cpu" in capsys.readouterr().err
    assert bench("break-even", "--device", "gpu") == 2
    assert "unknown device 'gpu'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--length", "1k"), "--length '1k' is not a list of numbers"),
        (("--batch", "0"), "--batch '0' has a number below 1"),
        (("--shape", "llama2-7"), "unknown shape 'llama2-7'; did you mean 'llama2-7b'"),
        (("--shape", "traced"), "shape 'traced' is that of a traced model"),
        (("--methods", "ciss"), "unknown method 'ciss'; did you mean 'cis'"),
        (("--methods", "cis", "--length", "256"), "budget=32"),
        (("--length", "9"), "length 9 leaves no prompt before 9 steps"),
        (("--steps", "12"), f"12 steps are no multiple of the block_size 8 of {METHOD}; give 16"),
        (("--dtype", "auto"), "unknown dtype 'auto'"),
        (("--device", "gpu"), "unknown device 'gpu'"),
        (("--backend", "cuda"), "unknown backend 'cuda'"),
        (("--inputs", "no.npz"), "there is no trace 'no.npz'"),
        (("--out", "no/folder/a.json"), "there is no folder 'no/folder' to write 'a.json' to"),
    ],
)
def test_errors_come_before_anything_is_measured(
    bench: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(attention, "bench_cell", None)
    monkeypatch.setattr(stream, "stream_bandwidth", lambda: pytest.fail("the machine was measured before the fault"))
    assert bench("attention", *more) == 2
    assert message in capsys.readouterr().err
