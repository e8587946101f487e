"""Paired differences of an evaluation run, checked by hand."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from prehoc.plot import figures_eval
from prehoc.plot.runs import read_run

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "trends.py"
FIRST, SECOND = "cis:budget=128,gate=query,matched=True", "quest:budget=128"


def test_scores_kl_and_mass_are_paired_by_sample(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("trends", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def line(method: str, sample: str, score: float, kl: float | None, mass: float | None) -> str:
        found = {"method": method, "sample": sample, "scores": {"f1": score}, "kl": kl}
        return json.dumps(found | {"retained_mass": mass, "audited": 0 if mass is None else 9})

    lines = [line(FIRST, "a", 0.5, 0.1, 0.9), line(FIRST, "b", 1.0, 0.3, 0.8), line(FIRST, "c", 1.0, None, None)]
    lines += [line(SECOND, "b", 0.0, 0.5, 0.7), line(SECOND, "a", 0.5, 0.2, 0.8), line(SECOND, "c", 1.0, 0.1, 0.5)]
    (tmp_path / "coqa.jsonl").write_text("\n".join(lines))
    ratios = ((FIRST, 0.25), (SECOND, None))
    rows = [{"method": name, "covered": False, "retrieval_ratio": ratio} for name, ratio in ratios]
    table = {"task": "coqa", "refused": "", "rows": rows}
    (tmp_path / "summary.json").write_text(json.dumps({"model": "m", "tables": [table]}))

    (found,) = script.trends(tmp_path)
    assert (found["first"], found["second"], found["budget"]) == (FIRST, SECOND, 128)
    assert (found["score_f1"]["mean"], found["score_f1"]["n"]) == (pytest.approx(1 / 3), 3)
    assert (found["kl"]["mean"], found["kl"]["n"]) == (pytest.approx(-0.15), 2), "c has none of dense's prefix"
    assert (found["mass"]["mean"], found["mass"]["n"]) == (pytest.approx(0.1), 2)

    document = tmp_path / "trends.json"
    document.write_text(json.dumps({"benchmark": "trends", "command": "", "rows": [found]}))
    (shown,) = figures_eval.trends(read_run(document))
    (row,) = shown.rows
    assert row[:5] == [FIRST, SECOND, "m", "coqa", "128"]
    assert row[6].startswith("-0.1500 [") and row[7].startswith("f1 +0.3333 [")
    assert row[8] == "0.250 and none"
