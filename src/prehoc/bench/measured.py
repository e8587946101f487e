"""What one row of the attention benchmark measured, call by call, and what it comes to."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from prehoc.bench.rows import Row
from prehoc.books import Books
from prehoc.methods import describe
from prehoc.selection import Decision, Selection, Step


class Measured:
    """What one row measured: seconds of every timed call by (layer, step), and the books of one round."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.books = Books()
        self.why = ""  # why it did not run
        self.gathers = False
        self.calls = 0
        self.parts: dict[tuple[int, int], list[dict[str, float]]] = {}
        self.checked: dict[str, float] = {}

    def enter(self, step: Step, at: tuple[int, int], parts: dict[str, float], decision: Decision) -> None:
        """Enter one call; the first at a point is booked, its repetitions read the same."""
        repeats = self.parts.setdefault(at, [])
        repeats.append(parts)
        if len(repeats) == 1:
            self.row.book(self.books, step, decision)
            self.gathers |= isinstance(decision.selection, Selection)
            self.calls += 1

    def result(self) -> dict[str, Any]:
        """Return the row for the document: milliseconds and bytes per call."""
        if self.why:
            return {"row": self.row.name, "why": self.why}
        self.books.flush()
        traffic = self.books.traffic
        totals = [
            _quantiles([sum(v for k, v in parts.items() if k != "mask") for parts in point])
            for point in self.parts.values()
        ]
        low, middle, high = (statistics.fmean(column) * 1e3 for column in zip(*totals, strict=True))
        names = dict.fromkeys(name for point in self.parts.values() for name in point[0])
        result: dict[str, Any] = {
            "row": self.row.name,
            "ms": middle,
            "ms_10": low,
            "ms_90": high,
            **{f"{name}_ms": self._part(name) * 1e3 for name in names},
            "calls": self.calls,
            "repeats": len(next(iter(self.parts.values()))),
            "keys_per_head": traffic.keys_read / traffic.triples,
            "visible_per_head": traffic.keys_visible / traffic.triples,
            "retrieval_ratio": traffic.retrieval_ratio if traffic.counted_triples else None,
            "gathers": self.gathers,
        }
        for name in ("scored", "compact", "processed", "copied", "indices", "anchors", "read", "dense"):
            result[f"bytes_{name}"] = getattr(traffic, f"bytes_{name}") / self.calls
        if (method := getattr(self.row, "method", None)) is not None:
            result["method"] = describe(method)
        return result | ({"refcheck": self.checked} if self.checked else {})

    def _part(self, name: str) -> float:
        return statistics.fmean(statistics.median(parts[name] for parts in point) for point in self.parts.values())


def _quantiles(values: list[float]) -> tuple[float, float, float]:
    """Return the 10 % quantile, the median and the 90 % quantile."""
    found = torch.quantile(
        torch.tensor(values, dtype=torch.float64), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    )
    low, middle, high = found.tolist()
    return low, middle, high
