"""Methods that evict, in the attention benchmark: their caches shrink as an engine's do, and what they read is checked."""

from __future__ import annotations

import pytest
import torch

from bench_shapes import TINY
from prehoc.bench import lineup, memory
from prehoc.bench.attention import Cell, Setup, bench_cell
from prehoc.bench.evicting import EvictingRow
from prehoc.bench.inputs import RandomInputs
from prehoc.bench.refcheck import RefcheckError
from prehoc.selection import Decision

SETUP = Setup(("h2o", "snapkv"), torch.float32, "reference", steps=6, rounds=2, layers=2, refcheck=True)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "last_cache_bytes", lambda device: 1)
    monkeypatch.setattr(lineup, "SDPA", {"cpu": ()})


def test_rows_hold_their_budget_and_equal_the_reference() -> None:
    rows = {row["row"]: row for row in bench_cell(Cell(TINY, 2, 512), RandomInputs(), SETUP)["rows"]}
    assert list(rows) == ["dense", "h2o", "snapkv"]
    for name in ("h2o", "snapkv"):
        assert rows[name]["method"] == f"{name}:budget=64" and rows[name]["calls"] == 2 * 6
        assert rows[name]["refcheck"]["error"] < 1e-5
        assert 64 <= rows[name]["keys_per_head"] < 64 + 7 and rows[name]["attention_ms"] > 0
        assert rows[name]["bytes_read"] < rows["dense"]["bytes_read"] / 4


def test_a_wrong_output_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = EvictingRow.run

    def wrong(self: EvictingRow, step: object) -> tuple[torch.Tensor, Decision, dict[str, float]]:
        out, *rest = real(self, step)  # type: ignore[arg-type]
        return out + 0.01, *rest

    monkeypatch.setattr(EvictingRow, "run", wrong)
    with pytest.raises(RefcheckError, match="h2o is wrong at layer 1, step 0, batch row 0: its output differs"):
        bench_cell(Cell(TINY, 2, 512), RandomInputs(), SETUP)
