"""`prehoc demo`: its text is there and of the size it claims, and the command answers twice."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from prehoc import cli, models
from prehoc.cli import _prompt, demo


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["prehoc", "demo", *args])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_the_text_is_long_and_fits(smollm2_path: Path) -> None:
    """Runs on whichever Python the tests run on; 3.11, 3.12 and 3.13 have another edition of the text each."""
    text = demo.document()
    assert "splitlines" in text, "the question can be answered from it"
    ids, cut = _prompt.Reader.of(models.resolve(str(smollm2_path))).fit(text, demo.ASK, new_tokens=64)
    assert 6000 < len(ids) < 7000
    assert cut == 0


def test_a_python_without_the_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "TOPIC", "no-such-topic")
    assert call(monkeypatch) == 2
    assert "this Python comes without 'no-such-topic'" in capsys.readouterr().err


def test_bad_budget_before_anything_else(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--budget", "3") == 2
    assert "budget=3 is too small" in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [False, True])
def test_answers_dense_and_sparse(
    as_json: bool, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command as it is, on the first part of its text, to be quick."""
    monkeypatch.setattr(demo, "MODEL", str(smollm2_path))
    whole = demo.document()
    monkeypatch.setattr(demo, "document", lambda: whole[:1500])
    options = ("--budget", "128", "--max-new-tokens", "6", "--threads", "1")
    assert call(monkeypatch, *options, *(("--json",) if as_json else ())) == 0
    captured = capsys.readouterr()
    assert demo.ASK in captured.err
    assert "prehoc bench measures speed" in captured.err, "one run is called one run"
    if as_json:
        document = json.loads(captured.out)
        assert [one["method"] for one in document["answers"]] == ["dense", "cpe:budget=128"]
        assert document["document"]["characters"] == 1500
    else:
        assert "dense" in captured.out and "cpe:budget=128" in captured.out
        assert "tokens are the same; one run" in captured.out
