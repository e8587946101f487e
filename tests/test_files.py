"""Texts that are read by one rule, and results that are written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from prehoc.files import atomic_path, read_text, write_document


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "the text file '.*a.txt' does not exist; give an existing one"),
        (b" \n", "the text file '.*a.txt' is empty; give one with text"),
        (b"\xef\xbb\xbfcaf\xe9", "'.*a.txt' is not UTF-8: byte 6 is 0xe9; convert it first"),
    ],
)
def test_a_text_that_cannot_be_used(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "a.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_text(file)
    with pytest.raises(ValueError, match="is a folder; give a text file"):
        read_text(tmp_path)


def test_facts_are_those_of_the_file_not_of_its_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    text, facts = read_text(tmp_path / "a.txt")
    assert text == "hello" and facts["file"] == "a.txt" and facts["bytes"] == 8


def test_a_new_file_has_the_users_permissions(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    with atomic_path(tmp_path / "a.png") as part:
        part.write_text("new")
    assert stat.S_IMODE((tmp_path / "a.png").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    assert (tmp_path / "a.png").read_text() == "new"


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_path(target) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["a.json"]


def failing(*args: object, **kwargs: object) -> None:
    raise OSError("the disk is full")


def test_every_writer_leaves_nothing_behind_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    from prehoc.plot import cis, tune
    from prehoc.trace import Trace

    monkeypatch.setattr(Path, "write_text", failing)
    monkeypatch.setattr(np, "savez", failing)
    monkeypatch.setattr(Figure, "savefig", failing)
    run = {"name": "r", "windows": 1, "window": 8, "model": "m", "chosen": {}, "rows": [], "limit": 0.01}
    base = {"budget": 64, "varies": "none", "label": "defaults", "method": "cis:budget=64", "bytes_share": 1.0}
    means = {"retained": {"mean": 1.0}, "oracle": {"mean": 1.0}}
    sweep = {"budgets": [64], "rows": [{**base, **means}], "model": "m", "prompt_tokens": 8}
    arrays = (np.zeros((1, 1, 1), np.float32),) * 9
    for write in (
        lambda: write_document(tmp_path / "a.json", {"rows": []}),
        lambda: cis.draw(sweep, tmp_path / "a.png"),
        lambda: tune.draw({"runs": [run]}, tmp_path / "a.png"),
        lambda: Trace(*arrays, meta={}).save(tmp_path / "a.npz"),  # type: ignore[arg-type]
    ):
        with pytest.raises(OSError, match="the disk is full"):
            write()
        assert not os.listdir(tmp_path)
