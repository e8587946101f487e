"""``prehoc tune prefill`` on a tiny model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prehoc import cli, models
from prehoc.eval.perplexity import paired_change

METHODS = "psaw:start_layer=1,phi=0.3 etf:start_layer=1,psi=0.3"


@pytest.fixture(scope="module")
def folder(tiny_llama: Callable[..., Path]) -> Path:
    return tiny_llama({"text.txt": 480}, layers=4, positions=128)


def tune(monkeypatch: pytest.MonkeyPatch, folder: Path, out: Path, *more: str, window: int = 100) -> int:
    words = [
        "--model",
        str(folder),
        "--text-file",
        str(folder / "text.txt"),
        "--out",
        str(out),
        "--window",
        str(window),
    ]
    words += ["--windows", "4", "--batch", "2", "--continuation", "12", *more]
    monkeypatch.setattr(sys, "argv", ["prehoc", "tune", "prefill", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


def test_rows_intervals_and_a_second_run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.json"
    monkeypatch.setenv("PREHOC_DATA", str(folder))
    assert tune(monkeypatch, folder, out, "--methods", METHODS, "--block", "16", "--json") == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document == json.loads(out.read_text())
    (run,) = document["runs"]
    assert (
        run["window"] == 100 and "$PREHOC_DATA/text.txt" in run["command"] and str(folder) not in json.dumps(document)
    )
    assert [row["method"].split(":")[0] for row in run["rows"]] == ["dense", "psaw", "etf"]
    dense, psaw, etf = run["rows"]
    change = paired_change(psaw["continuation_nll"], dense["continuation_nll"])
    assert psaw["continuation"]["high"] == pytest.approx(change.high, abs=2e-6)
    assert etf["window"] is None and etf["saved"] > 0

    part, picture = tmp_path / "t.part.jsonl", tmp_path / "t.png"
    lines = part.read_text()
    assert len(lines.splitlines()) == 6
    assert (
        tune(monkeypatch, folder, out, "--methods", METHODS, "--block", "16", "--search", "etf", "--plot", str(picture))
        == 0
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert part.read_text().startswith(lines)  # nothing was measured again
    assert "chosen for etf" in capsys.readouterr().out
    (run,) = json.loads(out.read_text())["runs"]
    assert run["rows"][:3] == document["runs"][0]["rows"] and set(run["chosen"]) == {"etf"}


@pytest.mark.parametrize(
    ("more", "window", "message"),
    [
        (["--methods", "pswa"], 100, "unknown method 'pswa'; did you mean 'psaw'?"),
        (["--methods", "cis"], 100, "method 'cis' does not prune a prefill"),
        (["--search", "psw"], 100, "unknown search 'psw'; did you mean 'psaw'?"),
        (["--matmul", "float16"], 100, "unknown matmul 'float16'"),
        ([], 129, "window=129 exceeds the model's 128 positions"),
        (["--windows", "40"], 100, "text.txt has 480 tokens, too short for 40 windows of 100"),
    ],
)
def test_bad_input(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    window: int,
    message: str,
) -> None:
    assert tune(monkeypatch, folder, tmp_path / "t.json", *more, window=window) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "bad.txt' does not exist"),
        (b"", "bad.txt' is empty"),
        (b"caf\xe9", "bad.txt' is not UTF-8: byte 3 is 0xe9"),
        (b"w0 w1", "bad.txt has 2 tokens, too short for 2 windows of 100"),
    ],
)
@pytest.mark.parametrize("command", ["prefill", "cis"])
def test_a_bad_text_is_named_before_the_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    content: bytes | None,
    message: str,
) -> None:
    bad = tmp_path / "bad.txt"
    if content is not None:
        bad.write_bytes(content)
    monkeypatch.setattr(models, "load", lambda *args, **kwargs: pytest.fail("the weights were loaded"))
    if not message.startswith("bad.txt has"):  # only a tokenizer tells how many tokens a text has
        monkeypatch.setattr(models, "resolve", lambda *args, **kwargs: pytest.fail("the model was looked for"))
    words = ["--model", str(folder), "--out", str(tmp_path / "t.json"), "--windows", "4"]
    words += ["--text-file", str(folder / "text.txt"), "--text-file", str(bad)]
    length = {"prefill": ["--window", "100", "--continuation", "12"], "cis": ["--prompt-tokens", "90", "--steps", "10"]}
    monkeypatch.setattr(sys, "argv", ["prehoc", "tune", command, *words, *length[command]])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_a_folder_is_no_place_for_the_document(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(monkeypatch, folder, tmp_path) == 2
    assert "is a folder; give the name of a file" in capsys.readouterr().err


def test_a_file_of_something_else_is_not_overwritten(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.json"
    out.write_text('{"other": 1}')
    assert tune(monkeypatch, folder, out) == 2
    assert "not a file of prehoc tune prefill" in capsys.readouterr().err
    assert out.read_text() == '{"other": 1}'
