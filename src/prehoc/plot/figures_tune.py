"""What the sweeps say: Figures 6, 7 and 9, Table VIII, and what is kept against what is read."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prehoc.methods import parse_method
from prehoc.plot import cis as cis_picture
from prehoc.plot import paper
from prehoc.plot import tune as prefill_picture
from prehoc.plot.page import Block, Drawing, Table, cap, interval, legend, number, panels, style
from prehoc.plot.runs import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
DILATION = {"m=0": 0.0, "m=k/6": 1 / 6, "defaults": 1 / 3, "m=k": 1.0}
"""Dilation m / k by the labels of the sweep."""
SWEEP = (
    "setting",
    "rho",
    "keys",
    "bytes of dense",
    "retained mass",
    "oracle",
    "beta",
    "beta at equal keys",
    "overlap",
)


def tune_cis(run: Run) -> list[Block]:
    """Return the tables and figures of ``prehoc tune cis``."""
    rows: list[Row] = run.document["rows"]
    budgets: list[int] = run.document["budgets"]
    base = cis_picture.varied(next(row for row in rows if row["varies"] == "none"))
    blocks: list[Block] = [
        Drawing(
            "Pareto: retained mass against bytes read",
            "Retained attention mass of every setting of CIS over the bytes read as a share of dense; a panel per budget, a "
            f"line per key that is varied, a star for what they vary ({base}), the oracle as a dashed line.",
            save=functools.partial(cis_picture.draw, run.document),
            paper=("Pareto",),
        ),
        Drawing(
            "Gap of retained mass and overlap over the retrieval ratio",
            f"{base} with different gates tau, joined by a line, at each budget: mass that the oracle of the same budget retains "
            "beyond CIS (beta, lower is better), and the share of its critical keys that were read (higher is better). Bars are "
            "95 % intervals.",
            draw=lambda: _over_ratio(rows, budgets),
            paper=("Figure 6",),
        ),
        Drawing(
            "Sensitivity to dilation and tau",
            "Beta of CIS (lower is better) over the number m of keys whose neighbours are read as well, as a share of k, and "
            f"over the gate tau; everything else as in {base}. Bars are 95 % intervals.",
            draw=lambda: _sensitivity(rows, budgets),
            paper=("Figure 9",),
        ),
    ]
    tuned = _tuned(rows)
    if tuned:
        blocks.append(tuned)
    for budget in budgets:
        some = [sweep_row(row) for row in rows if row["budget"] in (budget, None)]
        blocks.append(
            Table(f"{base} and what is varied, at a budget of {budget} keys", SWEEP, some, counted(rows), folded=True)
        )
    return blocks


def counted(rows: Sequence[Row]) -> str:
    """Return what n is behind the intervals of a sweep."""
    counts = sorted({row["n"] for row in rows})
    return f"n = {' or '.join(map(str, counts))} (window, layer, head) means."


def sweep_row(row: Row) -> list[str]:
    """Return the cells of a setting under `SWEEP`."""
    return [
        row["label"],
        number(row["retrieval_ratio"]["mean"], 3),
        number(row["keys"]["mean"], 0),
        f"{row['bytes_share']:.1%}",
        interval(row["retained"], 4),
        number(row["oracle"]["mean"], 4),
        interval(row["beta"], 4),
        number(row["beta_equal_keys"]["mean"], 4),
        number(row["overlap"]["mean"], 3),
    ]


def _gated(rows: Sequence[Row], budget: int) -> list[tuple[float, Row]]:
    """Return tau and row of those that vary it, by rising tau; labels say it, whatever the default was then."""
    found = [
        (float(row["label"].removeprefix("tau=")), row)
        for row in rows
        if row["budget"] == budget and row["varies"] == "tau"
    ]
    return sorted(found, key=lambda pair: pair[0])


def _errors(rows: Sequence[Row], measure: str) -> list[list[float]]:
    found = [row[measure] for row in rows]
    return [
        [0.0 if one["low"] is None else one["mean"] - one["low"] for one in found],
        [0.0 if one["high"] is None else one["high"] - one["mean"] for one in found],
    ]


def line(
    axis: Any, xs: Sequence[float], rows: Sequence[Row], measure: str, look: Mapping[str, Any], label: str
) -> None:
    """Draw a measure of some rows with its intervals over `xs`, in the style `look`."""
    ys = [row[measure]["mean"] for row in rows]
    axis.errorbar(xs, ys, yerr=_errors(rows, measure), capsize=2, elinewidth=0.7, label=label, **look)


def _over_ratio(rows: Sequence[Row], budgets: Sequence[int]) -> Figure:
    figure, axes = panels(2)
    for axis, measure in zip(axes, ("beta", "overlap"), strict=True):
        for index, budget in enumerate(budgets):
            own = [row for _, row in _gated(rows, budget)]
            line(axis, [row["retrieval_ratio"]["mean"] for row in own], own, measure, style(index), f"{budget} keys")
        axis.set(xlabel="retrieval ratio", ylabel=measure)
        if measure == "overlap":
            cap(axis, 1)
    legend(figure, axes[0])
    return figure


def _sensitivity(rows: Sequence[Row], budgets: Sequence[int]) -> Figure:
    figure, (dilation, gate) = panels(2)
    for index, budget in enumerate(budgets):
        varied = {row["label"]: row for row in rows if row["budget"] == budget}
        pairs = [(share, varied[label]) for label, share in DILATION.items() if label in varied]
        line(dilation, [x for x, _ in pairs], [row for _, row in pairs], "beta", style(index), f"{budget} keys")
        gated = _gated(rows, budget)
        line(gate, [tau for tau, _ in gated], [row for _, row in gated], "beta", style(index), f"{budget} keys")
    dilation.set(xlabel="dilation m / k", ylabel="beta")
    gate.set(xlabel="gate tau", ylabel="beta")
    legend(figure, dilation)
    return figure


def _tuned(rows: Sequence[Row]) -> Table | None:
    """Return the paper's settings of CIS at a budget of 128 beside ours, None if the sweep has none of them."""
    found = []
    for (size, tau, radius), (ratio, keys, score) in paper.TUNING.items():
        label = f"tau={tau}" if size == 8 else f"s={size}, tau={tau}"  # blocks of 8 and a radius of 1 are not named
        for row in rows:
            if row["budget"] == 128 and row["label"] == label and radius == 1 and "gate=query" in row["method"]:
                ours = [
                    number(row["retrieval_ratio"]["mean"], 3),
                    number(row["keys"]["mean"], 0),
                    interval(row["beta"], 4),
                ]
                found.append([f"s {size}, tau {tau}, r {radius}", *ours, number(ratio, 3), str(keys), f"{score:.2f}"])
    header = ("setting", "rho", "keys", "beta", "paper: rho", "paper: keys", "paper: GSM8K")
    note = "The paper: LLaMA2-7B-chat, sets per query head; ours: sets per KV head and a window that does not slide."
    return (
        Table("Table VIII: block size, gate and radius", header, found, note, paper=("Table VIII",)) if found else None
    )


def tune_prefill(run: Run) -> list[Block]:
    """Return the table and the figure of ``prehoc tune prefill``."""
    blocks: list[Block] = [
        Drawing(
            "Perplexity against prefill operations saved",
            "Change of the perplexity of a continuation behind a pruned prompt (full markers, 95 % intervals) and of the prompt "
            "itself (hollow markers) over the share of prefill operations saved; stars are the chosen settings.",
            save=functools.partial(prefill_picture.draw, run.document),
        )
    ]
    for one in run.document["runs"]:
        rows = [_prefill_row(row) for row in one["rows"]]
        header = ("setting", "operations saved", "perplexity", "against dense", "paper: perplexity")
        note = (
            f"n = {one['windows']} windows of {one['window']} tokens, {one['continuation']} tokens behind each. "
            f"Command: {one['command']}"
        )
        blocks.append(Table(f"Table VIII: pruned prompts of {one['name']}", header, rows, note, True, ("Table VIII",)))
    return blocks


def _prefill_row(row: Row) -> list[str]:
    found, method = row["continuation"], parse_method(row["method"])
    theirs = None
    if method.name == "psaw":
        theirs = paper.PSAW_PERPLEXITY.get((method.phi, method.alpha))  # type: ignore[attr-defined]
    ends = {"mean": found["change"], "low": found["low"], "high": found["high"]}
    percent = {name: None if value is None else 100 * value for name, value in ends.items()}
    return [
        row["method"],
        f"{row['saved']:.1%}",
        number(found["perplexity"], 3),
        interval(percent, 2, "+") + " %",
        number(theirs, 3),
    ]


def theory(run: Run) -> list[Block]:
    """Return the table and the figure of ``benchmarks/theory_looseness.py``."""
    results: Mapping[str, Row] = run.document["results"]
    names = [key.removesuffix("/information_change") for key in results if key.endswith("/information_change")]
    header = ("quantity", "n", "mean", "10 %", "median", "90 %", "max")
    rows = [
        [key, str(found["n"]), *(f"{found[name]:.4g}" for name in ("mean", "p10", "median", "p90", "max"))]
        for key, found in results.items()
    ]
    return [
        Drawing(
            "Information change against its bound",
            "Measured change of routing information (horizontal) and its bound (vertical), medians with the range from 10 to "
            "90 %; two bounds per selection. Above the dashed line y = x the bound holds.",
            draw=lambda: _bounds(results, names),
            paper=("Figure 7",),
        ),
        Table("How loose the bounds are", header, rows, folded=True),
    ]


def _bounds(results: Mapping[str, Row], names: Sequence[str]) -> Figure:
    figure, (axis,) = panels(1, 3.6)
    index = 0
    for bound, text in (("information_bound", "over keys"), ("information_bound_steps", "over steps")):
        for name in names:
            pair = [results[f"{name}/{one}"] for one in ("information_change", bound)]
            (x, y), ends = (
                (one["median"] for one in pair),
                [[[one["median"] - one["p10"]], [one["p90"] - one["median"]]] for one in pair],
            )
            shown = style(index) | {"linestyle": "none"}
            axis.errorbar(
                [x], [y], xerr=ends[0], yerr=ends[1], capsize=2, elinewidth=0.7, label=f"{name}, {text}", **shown
            )
            index += 1
    low, high = (math.inf, 0.0)
    for name in names:
        change = results[f"{name}/information_change"]
        low, high = min(low, max(change["p10"], 1e-5)), max(high, change["p90"])
    axis.plot([low, high], [low, high], color="black", linestyle="--", linewidth=0.8, label="y = x")
    axis.set(xscale="log", yscale="log", xlabel="information change, nats", ylabel="bound, nats")
    legend(figure, axis)
    return figure
