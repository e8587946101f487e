"""What pruning a prompt saves and costs, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prehoc.files import atomic_path
from prehoc.plot.cis import check_target

# told apart by shape and filling, not by colour alone
KINDS = {
    "psaw": ("PSAW", "o", "#0072b2"),
    "etf": ("ETF", "s", "#d55e00"),
    "cpe": ("both", "D", "#444444"),
}


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Plot the change of perplexity against the prefill operations saved, a panel per run, and save the picture.

    Full markers with 95 % intervals are continuation perplexities, hollow ones those of the window itself; a star is
    a chosen setting.

    Parameters
    ----------
    document : mapping
        What ``prehoc tune prefill`` wrote.
    path : Path
        A png, svg or pdf file.

    Raises
    ------
    ValueError
        When matplotlib is missing or does not know the kind of file.
    """
    kind = check_target(path)
    from matplotlib.figure import Figure

    runs = document["runs"]
    figure = Figure(figsize=(6.4 * len(runs), 5.0), layout="constrained")
    for number, (axes, run) in enumerate(zip(figure.subplots(1, len(runs), squeeze=False)[0], runs, strict=True)):
        _panel(axes, run)
        axes.set(
            title=f"{run['name']}: {run['windows']} windows of {run['window']}", xlabel="prefill operations saved, %"
        )
        if number == 0:
            axes.set_ylabel("perplexity against dense, %")
            figure.legend(
                *axes.get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside lower center", ncols=6
            )
    figure.suptitle(f"Pruned prompts of {runs[0]['model']}", fontsize=10)
    with atomic_path(path) as part:
        figure.savefig(part, format=kind, dpi=130)


def _panel(axes: Any, run: Mapping[str, Any]) -> None:
    chosen = {choice["method"] for choice in run["chosen"].values() if choice["within_limit"]}
    axes.axhline(0, color="black", linewidth=0.8, label="dense")
    axes.axhline(100 * run["limit"], color="black", linewidth=0.8, linestyle=":", label="limit of the upper end")
    for family, (name, marker, color) in KINDS.items():
        rows = [row for row in run["rows"] if row["method"].split(":")[0] == family]
        for i, row in enumerate(rows):
            x, found = 100 * row["saved"], row["continuation"]
            y = 100 * found["change"]
            label = f"{name}, continuation" if i == 0 else None
            if found["low"] is not None and found["high"] is not None:
                ends = [[y - 100 * found["low"]], [100 * found["high"] - y]]
                axes.errorbar([x], [y], yerr=ends, color=color, linewidth=1, capsize=2)
            star = row["method"] in chosen
            axes.plot([x], [y], marker=marker, color=color, markersize=6, linestyle="", label=label)
            if star:
                axes.plot([x], [y], marker="*", color="black", markersize=14, linestyle="", zorder=0)
            axes.annotate(_label(row), (x, y), textcoords="offset points", xytext=(6, 3), fontsize=6.5, color=color)
        own = [row for row in rows if row["window"] is not None]
        axes.plot(
            [100 * row["saved"] for row in own],
            [100 * row["window"]["change"] for row in own],
            marker=marker,
            markerfacecolor="white",
            color=color,
            linestyle="",
            label=f"{name}, window itself" if own else None,
        )
    axes.set_yscale("symlog", linthresh=2, linscale=1.5)
    low, high = axes.get_ylim()
    ticks = [tick for tick in (-5, -2, -1, 0, 1, 2, 5, 10, 20, 50) if low <= tick <= high]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    saved = [100 * row["saved"] for row in run["rows"] if row["saved"] > 0]
    if saved:  # the settings crowd at the left of a linear axis
        axes.set_xscale("log")
        axes.set_xlim(min(saved) / 1.25, max(saved) * 2.5)
        marks = [x for x in (0.5, 1, 2, 5, 10, 20, 50) if min(saved) / 1.25 <= x <= max(saved) * 2.5]
        axes.set_xticks(marks, [str(x) for x in marks])
        axes.minorticks_off()


def _label(row: Mapping[str, Any]) -> str:
    """Return what tells a setting from its neighbours: start layer, base and power; of both together the start layers."""
    values = dict(pair.split("=") for pair in row["method"].partition(":")[2].split(","))
    if "psaw_start_layer" in values:
        return f"{values['psaw_start_layer']} + {values['etf_start_layer']}"
    parts = []
    for base, power in (("phi", "alpha"), ("psi", "gamma")):
        if base in values:
            parts.append(f"{values['start_layer']} {values[base]} {values[power]}")
    sink = ", no sinks" if values.get("sink") == "0" else ""
    return " + ".join(parts) + sink
