"""Results are recognised by what they hold, and everything else is refused with what is accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bench_shapes import record
from prehoc.plot.report import KINDS
from prehoc.plot.runs import read_run

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_every_committed_result_is_recognised() -> None:
    kinds = {path.name: read_run(path).kind for path in sorted(BENCHMARKS.glob("*.json"))}
    assert set(kinds.values()) <= set(KINDS)
    assert kinds["decode_short.json"] == "decode" and kinds["demo.json"] == "demo"
    assert kinds["tune_cis_smollm2.json"] == "tune cis" and kinds["tune_prefill_smollm2.json"] == "tune prefill"
    assert kinds["rivals_smollm2.json"] == kinds["rivals_depth_smollm2.json"] == "rivals"
    assert kinds["theory_looseness.json"] == "theory" and kinds["eval_trends.json"] == "trends"


def test_folders_and_traces(tmp_path: Path, tiny_llama: Callable[..., Path]) -> None:
    record(tiny_llama, 20, 3).save(tmp_path / "t.npz")
    found = read_run(tmp_path / "t.npz")
    assert found.kind == "trace" and found.trace is not None and found.document["steps"] == 3
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({"tables": [], "chat_template": None}))
    for path in (folder, folder / "summary.json"):
        assert (read_run(path).kind, read_run(path).name) == ("eval", "mine")
    (folder / "summary.json").rename(folder / "kept.json")
    assert (read_run(folder / "kept.json").kind, read_run(folder / "kept.json").name) == ("eval", "kept.json")


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no run .*nowhere.* accepted are: JSON of prehoc bench"):
        read_run(tmp_path / "nowhere")
    for name, text, why in (
        ("a.json", "{", "cannot be read as JSON"),
        ("b.json", "[1]", "nothing that prehoc wrote; accepted are"),
        ("c.json", '{"rows": [{"method": "dense"}]}', "nothing that prehoc wrote"),
        ("d.json", '{"rows": []}', "nothing that prehoc wrote"),
        ("e.txt", "text", "cannot be read as JSON"),
        ("f.npz", "text", "is not a trace that prehoc wrote"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=why):
            read_run(tmp_path / name)
    with pytest.raises(ValueError, match="is no run of prehoc eval"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="is not finished; give its command once more"):
        read_run(tmp_path)
