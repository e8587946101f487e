"""What every method reads and misses on the same queries and keys: Figure 6 and the controls of Tables VI, VII and IX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prehoc.methods import parse_method
from prehoc.plot import paper
from prehoc.plot.figures_tune import SWEEP, counted, line, sweep_row
from prehoc.plot.page import Block, Drawing, Table, cap, interval, legend, method_styles, number, panels
from prehoc.plot.pareto import Point, pareto
from prehoc.plot.runs import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]


def rivals(run: Run) -> list[Block]:
    """Return the tables and figures of ``benchmarks/rivals.py``."""
    rows = [_as_setting(row) for row in run.document["rows"]]
    budgets = sorted({row["budget"] for row in rows if row["budget"] is not None})
    points = [
        Point(
            row["label"], row["retained"]["mean"], (row["retained"]["low"], row["retained"]["high"]), row["bytes_share"]
        )
        for row in rows
    ]
    blocks: list[Block] = [pareto("mass of every method", "retained attention mass", points)]
    sharing = [row for row in rows if row["retrieval_ratio"]["mean"] and not row["label"].startswith("oracle")]
    if sharing:
        blocks.append(
            Drawing(
                "Gap of retained mass and overlap over the retrieval ratio, by method",
                "Mass that the oracle of the same budget retains beyond a method (beta, lower is better), and the share of its "
                "critical keys that were read (higher is better); a line joins the budgets of one method. Bars are 95 % "
                "intervals.",
                draw=lambda: _methods_over_ratio(sharing),
                paper=("Figure 6",),
            )
        )
    for budget in budgets or [None]:
        some = [sweep_row(row) for row in rows if row["budget"] in (budget, None)]
        blocks.append(
            Table(
                f"Methods at a budget of {budget} keys" if budget else "Methods",
                ("method", *SWEEP[1:]),
                some,
                counted(rows),
            )
        )
    controls = [
        (row["label"], row["retrieval_ratio"]["mean"], row["keys"]["mean"], row["beta"])
        for row in rows
        if row["budget"]
    ]
    return [*blocks, *control_table(controls)]


def _as_setting(row: Row) -> Row:
    """Return a row of the rivals in the form of a sweep's; the oracle's mass is what is missed and what is retained."""
    found: dict[str, Any] = {"label": row["method"]}
    for name, value in row.items():
        triple = isinstance(value, list)
        found["retrieval_ratio" if name == "retrieved" else name] = (
            dict(zip(("mean", "low", "high"), value, strict=True)) if triple else value
        )
    found["oracle"] = {"mean": found["retained"]["mean"] + found["beta"]["mean"]}
    return found


def _methods_over_ratio(rows: Sequence[Row]) -> Figure:
    figure, axes = panels(2, 3.0)
    styles = method_styles(row["label"] for row in rows)
    for axis, measure in zip(axes, ("beta", "overlap"), strict=True):
        for name, look in styles.items():
            own = [row for row in rows if row["label"] == name and row[measure]["mean"] is not None]
            line(axis, [row["retrieval_ratio"]["mean"] for row in own], own, measure, look, name)
        axis.set(xlabel="retrieval ratio", ylabel=measure)
        if measure == "overlap":
            cap(axis, 1)
    legend(figure, axes[0])
    return figure


def control_table(rows: Sequence[tuple[str, float | None, float | None, Any]]) -> list[Table]:
    """Return Tables VI, VII and IX from (method, retrieval ratio, keys, beta), those of which there is a control."""
    return [*_reuse_table(rows), *_gate_table(rows)]


def _gate_table(rows: Sequence[tuple[str, float | None, float | None, Any]]) -> list[Table]:
    gates = [(parse_method(row[0]).gate, *row) for row in rows if row[0].startswith("cis")]  # type: ignore[attr-defined]
    if {gate for gate, *_ in gates} <= {"score", "query"}:  # no control
        return []
    found = [
        [method, gate, number(ratio, 3), number(keys, 0), interval(beta, 4)]
        + [number(score, 2) for score in paper.GATES.get(gate, (None, None))]
        for gate, method, ratio, keys, beta in gates
    ]
    header = ("method", "gate", "rho", "keys", "beta", "paper: s = 8", "paper: s = 16")
    note = (
        "The paper has scores (higher is better), beta is mass (lower is better): compare the order, at an equal rho."
    )
    return [Table("Table IX: what the gate compares", header, found, note, paper=("Table IX",))]


def _reuse_table(rows: Sequence[tuple[str, float | None, float | None, Any]]) -> list[Table]:
    known = [
        (row, paper.CONTROLS[row[0].partition(":")[0]])
        for row in rows
        if row[0].partition(":")[0] in paper.CONTROLS and getattr(parse_method(row[0]), "gate", "query") == "query"
    ]
    if {row[0].partition(":")[0] for row, _ in known} <= {"cis"}:
        return []
    found = [
        [
            method,
            number(ratio, 3),
            number(keys, 0),
            interval(beta, 4),
            *(f"{one:.3f}" for one in theirs[:2]),
            f"{theirs[2]:.2f}",
        ]
        for (method, ratio, keys, beta), theirs in known
    ]
    header = ("method", "rho", "keys", "beta", "paper VI: beta", "paper VII: beta", "paper VI: GSM8K")
    note = "The paper: about 1,060 keys at a retrieval ratio of about 10 %. Compare the order."
    return [Table("Tables VI and VII: controls", header, found, note, paper=("Tables VI/VII",))]
