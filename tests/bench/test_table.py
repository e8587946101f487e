"""What is derived from times and bytes, checked by hand, and when a document may be continued."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from prehoc.bench.table import derive, draw, resume

STREAM = 10e9


def row(name: str, ms: float, attention: float, **bytes_: float) -> dict[str, Any]:
    names = ("scored", "compact", "processed", "copied", "indices", "anchors")
    parts = {f"bytes_{part}": bytes_.get(part, 0.0) for part in names}
    return {
        "row": name,
        "ms": ms,
        "ms_10": ms * 0.9,
        "ms_90": ms * 1.1,
        "attention_ms": attention,
        "keys_per_head": 10.0,
        "retrieval_ratio": None,
        "gathers": name == "cis-8",
        **parts,
        "bytes_read": sum(parts.values()),
    }


def cell(*rows: dict[str, Any], stream: float = STREAM) -> dict[str, Any]:
    shape = {"name": "tiny", "layers": 4, "heads": 4, "kv_heads": 2, "dim": 8}
    return {
        "shape": shape,
        "batch": 2,
        "length": 512,
        "layers": [0],
        "rows": list(rows),
        "stream_bytes_per_second": stream,
    }


def test_columns_follow_from_times_and_bytes() -> None:
    sparse = row("cis-8", 2.0, 1.5, scored=4e6, compact=2e6, processed=5e6, copied=1e6, indices=1e6, anchors=0.5e6)
    one = cell(
        row("sdpa-flash", 9.0, 9.0, processed=40e6),
        row("sdpa-math", 80.0, 80.0, processed=40e6),
        {"row": "flex (cis-8)", "why": "no compiler"},
        row("dense", 6.0, 6.0, processed=40e6),
        sparse,
    )
    assert derive(one, "cpu") == []
    assert sparse["gb_per_second"] == pytest.approx(13.5 / 2.0)  # MB per ms
    assert sparse["stream_percent"] == pytest.approx(67.5)
    assert sparse["attention_percent"] == pytest.approx(6 / 1.5 / 10 * 100)
    assert sparse["over_formula"] == pytest.approx(2.0 / (6 / 0.9 / 10 + 6 / 0.75 / 10))
    assert sparse["times_dense"] == 3.0 and sparse["times_sdpa"] == 4.5
    dense = one["rows"][3]
    assert dense["over_formula"] == pytest.approx(6 / (40 / 0.9 / 10)), "what is read in order reaches 90 %"
    assert derive(one, "cuda") == []
    assert sparse["over_formula"] == pytest.approx(2.0 / (6 / 0.85 / 10 + 6 / 0.65 / 10))


def test_nothing_reads_faster_than_memory() -> None:
    one = cell(row("dense", 4.0, 3.9, processed=40e6), row("cis-8", 2.0, 0.4, processed=5e6, scored=4e6))
    assert derive(one, "cpu") == [
        "dense at tiny 2 x 512 reads at 103 % of the stream bandwidth",
        "cis-8 at tiny 2 x 512 reads at 125 % of the stream bandwidth",
    ]
    assert derive(cell(*one["rows"], stream=2 * STREAM), "cpu") == []
    assert derive({"skipped": "no memory"}, "cpu") == []


def test_the_table_has_every_row_and_says_what_did_not_run() -> None:
    flexed = row("flex (cis-8)", 3.0, 3.0, processed=5e6) | {"mask_ms": 7.0}
    one = cell(row("dense", 6.0, 6.0, processed=40e6), flexed, {"row": "sdpa-math", "why": "needs 3 GiB more"})
    derive(one, "cpu")
    console = Console(width=170, record=True, file=io.StringIO())
    console.print(draw(one))
    shown = console.export_text()
    for text in ("tiny (4/2 x 8), batch 2 x 512", "stream 10.0 GB/s", "dense", "6.000", "5.400-6.600", "40.00"):
        assert text in shown
    assert "sdpa-math did not run: needs 3 GiB more" in shown and "building its mask takes 7.000 ms more" in shown
    skipped = {**one, "skipped": "needs 9 GiB"}
    assert draw(skipped) == "tiny (4/2 x 8), batch 2 x 512: not run, needs 9 GiB"


FACTS = {"benchmark": "attention", "settings": {"steps": 4}, "machine": {"cpu": "a"}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a file of prehoc bench attention"),
        ("[]", "is not a file of prehoc bench attention"),
        (json.dumps({**FACTS, "benchmark": "decode", "cells": []}), "another benchmark \\('decode'\\)"),
        (
            json.dumps({**FACTS, "settings": {"steps": 8}, "cells": []}),
            "another settings 'steps' \\(8\\); give another",
        ),
        (json.dumps({**FACTS, "machine": {}, "cells": []}), "another machine 'cpu' \\(None\\)"),
    ],
)
def test_a_file_of_something_else_is_never_overwritten(tmp_path: Path, content: str, message: str) -> None:
    out = tmp_path / "a.json"
    out.write_text(content)
    with pytest.raises(ValueError, match=message):
        resume(out, FACTS)


def test_finished_cells_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    assert resume(None, FACTS) == resume(out, FACTS) == []
    done, skipped = cell(row("dense", 1.0, 1.0)), {"skipped": "no memory"}
    out.write_text(json.dumps({**FACTS, "cells": [done, skipped]}))
    assert resume(out, FACTS) == [done], "what did not fit may fit today"
