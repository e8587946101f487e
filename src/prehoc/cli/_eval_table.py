"""The printed table of an evaluated task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from prehoc.eval.tasks import Metric, Task

_READING = ("decoded", "keys", "MB/token", "of dense", "rho", "mass", "beta", "agree", "KL", "ms/token")


def show(table: dict[str, Any], task: Task) -> None:
    """Print a table and its notes on stdout; nothing of a table that was refused."""
    if table["refused"]:
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=170, highlight=False)  # a log file has no width of its own
    rows = table["rows"]
    aware = {None: "no question", True: "query-aware prefill", False: "question decoded"}[rows[0]["query_aware"]]
    printed = Table(title=f"{task.name}: n = {rows[0]['n']}, {aware}, intervals 95 %")
    printed.add_column("method")
    for metric in task.metrics:
        printed.add_column(f"{metric.name}{' ppl' if metric.form == 'perplexity' else ''}", justify="right")
        printed.add_column("to dense", justify="right")
    for name in _READING:
        printed.add_column(name, justify="right")
    for row in rows:
        cells = [cell for metric in task.metrics for cell in _score(metric, row)]
        printed.add_row(row["method"], *cells, *_reading(row))
    console.print(printed)
    for note in table["notes"]:
        console.print(f"  {note}")


def _score(metric: Metric, row: dict[str, Any]) -> list[str]:
    score = row["scores"][metric.name]
    if score["mean"] is None:
        return ["-", "-"]
    unit = " %" if metric.form == "perplexity" else ""
    mean = f"{score['mean']:.1f}{_between(score, '.1f')}"
    if row["covered"]:
        return [f"{mean} covered", "covered"]
    difference = score["difference"]
    if row["method"] == "dense" or not difference:
        return [mean, ""]
    return [mean, f"{difference['mean']:+.1f}{unit}{_between(difference, '+.1f')}"]


def _between(found: dict[str, Any], form: str) -> str:
    return "" if found["low"] is None else f" [{found['low']:{form}}, {found['high']:{form}}]"


def _reading(row: dict[str, Any]) -> list[str]:
    def cell(value: float | None, form: str) -> str:
        return "" if value is None else f"{value:{form}}"

    dense, mass, beta, kl = row["method"] == "dense", row["retained_mass"], row["beta"], row["kl"]
    bytes_read = row["bytes_per_token"]
    return [
        str(row["decoded"]),
        cell(row["keys"], ".0f"),
        cell(None if bytes_read is None else bytes_read / 1e6, ".2f"),
        cell(row["bytes_share"], ".0%"),
        cell(row["retrieval_ratio"], ".3f"),
        "" if mass is None else f"{mass['mean']:.4f} (n {mass['n']})",
        cell(None if beta is None else beta["mean"], "+.4f"),
        "" if dense else cell(row["agreement"], ".0%"),
        "" if dense or kl is None else f"{kl['mean']:.2g}",
        cell(None if row["seconds_per_token"] is None else row["seconds_per_token"] * 1e3, ".0f"),
    ]
