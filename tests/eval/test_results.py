"""The folder of a run: repaired, resumed, and never mixed with another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import filelock
import pytest

from prehoc.eval.results import Results


def results(folder: Path, methods: Any = None, task: str = "coqa", **identity: Any) -> Results:
    keys = {"cis": {"tau": 0.8}} if methods is None else methods
    return Results(folder, {"model": "m", "seed": 0, **identity}, keys, {"tasks": {task: {"samples": 3}}})


def test_lines_come_back_and_a_half_written_one_is_removed(tmp_path: Path) -> None:
    with results(tmp_path / "run").opened() as run:
        run.append("coqa", [{"sample": "a"}, {"sample": "b é"}])
        run.append("coqa", [{"sample": "c"}])
    file = tmp_path / "run" / "coqa.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"sample": "d", "scor')
    with results(tmp_path / "run").opened() as run:
        assert [line["sample"] for line in run.read("coqa")] == ["a", "b é", "c"]
        assert file.read_bytes() == whole
        run.append("coqa", [{"sample": "d"}])
        assert len(run.read("coqa")) == 4 and run.read("gsm8k") == []


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    with results(tmp_path).opened() as run:
        run.append("coqa", [{"sample": "a"}])
        (tmp_path / "coqa.jsonl").write_text('{"sample": "a"}\nrubbish\n{"sample": "b"}\n')
        with pytest.raises(ValueError, match=r"coqa.jsonl', line 2 is damaged"):
            run.read("coqa")


def test_numbers_that_json_does_not_have_are_refused(tmp_path: Path) -> None:
    with results(tmp_path).opened() as run:
        with pytest.raises(ValueError, match="not JSON compliant"):
            run.append("coqa", [{"kl": float("nan")}])
        assert run.read("coqa") == []


def test_another_run_is_refused_and_more_methods_are_not(tmp_path: Path) -> None:
    with results(tmp_path).opened():
        pass
    with (
        pytest.raises(ValueError, match=r"holds another run \(seed 0 there, 1 now\); choose another folder"),
        results(tmp_path, seed=1).opened(),
    ):
        pass
    with (
        pytest.raises(ValueError, match="was made when cis had other defaults"),
        results(tmp_path, {"cis": {"tau": 0.7}}).opened(),
    ):
        pass
    with results(tmp_path, {"cpe": {"tau": 0.8}}, task="gsm8k").opened():
        pass
    about = json.loads((tmp_path / "run.json").read_text())
    assert set(about["methods"]) == {"cis", "cpe"} and set(about["tasks"]) == {"coqa", "gsm8k"}


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="holds files of something else"), results(tmp_path).opened():
        pass
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ValueError, match="is not a run of prehoc eval"), results(tmp_path).opened():
        pass
    with pytest.raises(ValueError, match="cannot write to"), results(tmp_path / "mine.jsonl").opened():
        pass


def test_two_processes_do_not_write_to_one_folder(tmp_path: Path) -> None:
    with (
        filelock.FileLock(tmp_path / ".lock"),
        pytest.raises(ValueError, match="another process writes to"),
        results(tmp_path).opened(),
    ):
        pass
