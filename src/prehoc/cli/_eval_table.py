"""The printed table of an evaluated task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from prehoc.cli import _common

if TYPE_CHECKING:
    from prehoc.eval.tasks import Metric, Task

_READING = ("decoded", "keys", "MB/token", "of dense", "rho", "mass audited", "beta", "ms/token")


def show(table: dict[str, Any], task: Task) -> None:
    """Print what a task scored, what the methods read, and the notes; nothing of a table that was refused."""
    if table["refused"]:
        return
    rows = table["rows"]
    aware = {None: "no question", True: "query-aware prefill", False: "question decoded"}[rows[0]["query_aware"]]
    scores = Table(title=f"{task.name}: n = {rows[0]['n']}, {aware}, intervals 95 %")
    scores.add_column("method")
    for metric in task.metrics:
        scores.add_column(f"{metric.name}{' ppl' if metric.form == 'perplexity' else ''}", justify="right")
        scores.add_column("to dense", justify="right")
    reading = Table(title=f"{task.name}: decode")
    reading.add_column("method")
    for name in ("same tokens", "KL to dense"):
        scores.add_column(name, justify="right")
    for name in _READING:
        reading.add_column(name, justify="right")
    for part, own in rows[0]["split"].items():
        scores.add_column(f"{part}, n = {own['n']}", justify="right")
    for row in rows:
        cells = [cell for metric in task.metrics for cell in _score(metric, row)]
        parts = [f"{own['mean']:.1f}{_between(own, '.1f')}" for own in row["split"].values()]
        scores.add_row(row["method"], *cells, *_alike(row), *parts)
        reading.add_row(row["method"], *_reading(row))
    _common.show(scores)
    _common.show(reading)
    for note in table["notes"]:
        print(f"  {note}")


def _score(metric: Metric, row: dict[str, Any]) -> list[str]:
    score = row["scores"][metric.name]
    if score["mean"] is None:
        return ["-", "-"]
    unit = " %" if metric.form == "perplexity" else ""
    mean = f"{score['mean']:.1f}{_between(score, '.1f')}"
    if row["covered"]:
        return [mean, "covered"]
    difference = score["difference"]
    if row["method"] == "dense" or not difference:
        return [mean, ""]
    return [mean, f"{difference['mean']:+.1f}{unit}{_between(difference, '+.1f')}"]


def _between(found: dict[str, Any], form: str) -> str:
    return "" if found["low"] is None else f" [{found['low']:{form}}, {found['high']:{form}}]"


def _alike(row: dict[str, Any]) -> list[str]:
    if row["method"] == "dense":
        return ["", ""]
    return [_cell(row["agreement"], ".0%"), "" if row["kl"] is None else f"{row['kl']['mean']:.2g}"]


def _reading(row: dict[str, Any]) -> list[str]:
    mass, beta, read, seconds = row["retained_mass"], row["beta"], row["bytes_per_token"], row["seconds_per_token"]
    return [
        str(row["decoded"]),
        _cell(row["keys"], ".0f"),
        _cell(None if read is None else read / 1e6, ".2f"),
        _cell(row["bytes_share"], ".0%"),
        _cell(row["retrieval_ratio"], ".3f"),
        "" if mass is None else f"{mass['mean']:.4f}{_between(mass, '.4f')}, n {mass['n']}",
        "" if beta is None else f"{beta['mean']:+.4f}{_between(beta, '+.4f')}",
        _cell(None if seconds is None else seconds * 1e3, ".0f"),
    ]


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"
