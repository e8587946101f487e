"""Bytes at equal mass, on curves that can be read off by hand."""

from __future__ import annotations

from typing import Any

import pytest

from prehoc.eval.cis_sweep import bytes_at_equal_mass


def row(label: str, budget: int | None, mass: float, share: float) -> dict[str, Any]:
    return {"label": label, "budget": budget, "retained": {"mean": mass}, "bytes_share": share}


def test_interpolates_between_the_measured_budgets() -> None:
    rows = [row("dense", None, 1.0, 1.0)]
    rows += [row("strict", 64, 0.80, 0.4), row("strict", 128, 0.90, 0.5)]
    rows += [row("loose", 128, 0.88, 0.30), row("loose", 64, 0.76, 0.20), row("loose", 256, 0.92, 0.50)]  # any order
    (low, at_low), (high, at_high) = bytes_at_equal_mass(rows, ["loose", "strict"], "strict")
    assert (low, high) == (0.80, 0.90)
    assert at_low["loose"] == pytest.approx(0.20 + 0.10 * 0.04 / 0.12)
    assert at_high["loose"] == pytest.approx(0.30 + 0.20 * 0.02 / 0.04)
    assert at_low["strict"] == pytest.approx(0.4) and at_high["strict"] == pytest.approx(0.5)


def test_says_nothing_outside_of_what_was_measured() -> None:
    rows = [
        row("strict", 64, 0.80, 0.4),
        row("low", 64, 0.5, 0.1),
        row("low", 128, 0.7, 0.2),
        row("high", 64, 0.9, 0.3),
    ]
    assert bytes_at_equal_mass(rows, ["low", "high"], "strict") == [(0.80, {"low": None, "high": None})]
