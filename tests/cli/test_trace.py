"""``prehoc trace`` on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from prehoc import cli
from prehoc.trace import Trace


@pytest.fixture(scope="module")
def folder(tiny_llama: Callable[..., Path]) -> Path:
    return tiny_llama({"text.txt": 240})


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """Run the command line in this process; returns the exit code."""
    monkeypatch.setattr("sys.argv", ["prehoc", *args])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def arguments(folder: Path, target: Path, **changes: str) -> list[str]:
    """The command with some options replaced."""
    options = {
        "model": str(folder),
        "text-file": str(folder / "text.txt"),
        "prompt-tokens": "100",
        "steps": "12",
        "method": "cis:critical=24",
        "out": str(target),
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    return ["trace", *(word for name, value in options.items() for word in (f"--{name}", value))]


def test_writes_the_trace_and_prints_a_table(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.npz"
    assert call(monkeypatch, *arguments(folder, out), "--set", "tau=0.5", "--set", "radius=2") == 0
    shown = capsys.readouterr().out
    for word in ("retrieval ratio", "retained mass", "oracle", "beta", "overlap", "cosine", str(out)):
        assert word in shown
    found = Trace.load(out)
    assert found.retained.shape == found.keys.shape == (12, 2, 2)
    assert found.meta["keys"]["tau"] == 0.5 and found.meta["keys"]["radius"] == 2
    assert found.meta["text"]["file"] == "text.txt" and len(found.meta["text"]["sha256"]) == 64
    assert str(Path.home()) not in found.meta["command"] and "--set tau=0.5" in found.meta["command"]
    assert found.meta["machine"]["cpu"] and found.meta["versions"]["torch"] == torch.__version__
    assert found.indices is None and found.q is None


def test_json_is_one_document_and_records_come_on_request(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.npz"
    extra = ["--observe", "--record", "selections", "--record", "qk", "--json", "--seed", "3", "--dtype", "bfloat16"]
    assert call(monkeypatch, *arguments(folder, out), *extra) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["summary"]["triples"] == 48
    assert document["meta"]["observe"] is True and document["meta"]["seed"] == 3
    assert document["meta"]["model"]["dtype"] == "bfloat16"
    found = Trace.load(out)
    assert found.indices is not None and found.indices.shape[:3] == (12, 2, 2)
    assert found.q is not None and found.q.shape == (12, 2, 4, 8)
    assert found.k is not None and found.k.shape == (2, 2, 112, 8) and np.isfinite(found.k).all()


def test_dense_has_nothing_to_say_where_there_is_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, *arguments(folder, tmp_path / "t.npz", method="dense"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["summary"]["retrieval_ratio"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_tokens": "230", "steps": "11"}, "the text has 240 tokens, but 230 prompt tokens + 11 steps need 241"),
        (
            {"prompt_tokens": "250"},
            "250 prompt tokens + 12 steps exceed the model's 256 positions; lower their sum to 256",
        ),
        ({"steps": "0"}, "Invalid value for '--steps': Input should be greater than or equal to 1"),
        ({"prompt_tokens": "0"}, "Invalid value for '--prompt-tokens': Input should be greater than or equal to 1"),
        ({"method": "cis:critcal=24"}, "unknown key 'critcal' for method 'cis'; did you mean 'critical'?"),
        ({"method": "ciss"}, "unknown method 'ciss'; did you mean 'cis'?"),
        ({"method": "cis:tau=2"}, "tau=2.0 must lie in [-1.0, 1.0]"),
        ({"record": "kq"}, "unknown record 'kq'; did you mean 'qk'?"),
        ({"set": "tau"}, "'tau' is not key=value"),
        ({"text_file": "no-such.txt"}, "the text file 'no-such.txt' does not exist; give an existing one"),
        ({"out": "no/such/folder/t.npz"}, "there is no folder 'no/such/folder' to write 't.npz' to"),
        ({"model": "smollm2-135m-instuct"}, "unknown model 'smollm2-135m-instuct'; did you mean"),
        ({"dtype": "float23"}, "unknown dtype 'float23'"),
        ({"backend": "cuda"}, "unknown backend 'cuda'"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    message: str,
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "forward", None)  # all of this is found before the model runs
    assert call(monkeypatch, *arguments(folder, tmp_path / "t.npz", **changes)) == 2
    captured = capsys.readouterr()
    assert f"error: {message}" in captured.err.replace("Error:", "error:")  # typer's own, of an option's bounds
    assert captured.out == "" and not list(tmp_path.iterdir())


def test_a_text_that_is_not_utf8(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 noir")
    assert call(monkeypatch, *arguments(folder, tmp_path / "t.npz", text_file=str(tmp_path / "latin.txt"))) == 2
    assert "is not UTF-8: byte 3 is 0xe9" in capsys.readouterr().err
