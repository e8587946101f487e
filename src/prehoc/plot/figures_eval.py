"""What an evaluation says: scores beside the paper's, over budget, retrieval ratio, bytes and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prehoc.plot import paper
from prehoc.plot.figures_rivals import control_table
from prehoc.plot.page import Block, Drawing, Table, cap, interval, legend, method_styles, number, panels
from prehoc.plot.pareto import Point, family, pareto
from prehoc.plot.runs import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
_READING = ("method", "decoded", "keys", "MB/token", "of dense", "rho", "mass audited", "beta", "ms/token")


def evaluation(run: Run) -> list[Block]:
    """Return the tables and figures of ``prehoc eval``: nothing but the reason for a table that was refused."""
    blocks: list[Block] = []
    for table in run.document["tables"]:
        if table["refused"]:
            blocks.append(Table(f"{table['task']}: refused", ("task", "why"), [[table["task"], table["refused"]]]))
        else:
            blocks += _task(table)
    return blocks


def trends(run: Run) -> list[Block]:
    """Return the paired differences of ``benchmarks/trends.py``, a table for each thing that the paper says."""
    header = ("first", "second", "model", "task", "keys", "retained mass", "KL to dense", "scores", "rho")
    return [
        Table(
            claim[:1].upper() + claim[1:],
            header,
            [_trend(row) for row in run.document["rows"] if row["claim"] == claim],
            "First minus second, with 95 % intervals and the number of pairs; rho of the first and of the second.",
        )
        for claim in dict.fromkeys(row["claim"] for row in run.document["rows"])
    ]


def _trend(row: Row) -> list[str]:
    scores = [f"{name.removeprefix('score_')} {_paired(row[name])}" for name in row if name.startswith("score_")]
    mass, divergence = (_paired(row[name]) if name in row else "" for name in ("mass", "kl"))
    names = [row[name] for name in ("first", "second", "model", "task")]
    ratios = " and ".join("none" if ratio is None else f"{ratio:.3f}" for ratio in row["retrieval_ratios"])
    return [*names, str(row["budget"]), mass, divergence, "; ".join(scores), ratios]


def _paired(found: Row) -> str:
    return f"{interval(found, 4, '+')} (n = {found['n']})"


def _task(table: Row) -> list[Block]:
    task, rows = table["task"], table["rows"]
    metric = next(iter(rows[0]["scores"]))
    scored = [row for row in rows if row["scores"][metric]["mean"] is not None]
    blocks: list[Block] = [_scores(table), _reading(table)]
    blocks += _paper(task, rows)
    controls = [(row["method"], row["retrieval_ratio"], row["keys"], row["beta"]) for row in rows if row["beta"]]
    blocks += control_table(controls)
    if not table["not_informative"]:  # at the floor no method can lose anything: a figure would mislead
        blocks += _figures(task, metric, scored)
    masses = [
        Point(
            family(row["method"]),
            row["retained_mass"]["mean"],
            (row["retained_mass"]["low"], row["retained_mass"]["high"]),
            row["bytes_share"],
        )
        for row in rows
        if row["retained_mass"] and row["bytes_share"] is not None
    ]
    if masses:
        blocks.append(pareto(f"{task}: mass", "retained attention mass, audited", masses))
    return blocks


def _figures(task: str, metric: str, scored: Sequence[Row]) -> list[Block]:
    """Return the scores over the budget, the retrieval ratio, bytes and time."""
    blocks: list[Block] = []
    label = f"{task}: {metric}"
    if len({row["keys"] for row in scored if row["keys"] is not None}) > 1:
        blocks.append(
            Drawing(
                f"{label} over the budget",
                f"Score {metric} of {task} with its 95 % interval over the keys processed per head and step; a line joins "
                "the budgets of one method.",
                draw=lambda: _over(scored, metric, "keys", "keys processed", (metric,)),
                paper=("Figure 12",),
            )
        )
    sharing = [row for row in scored if row["retrieval_ratio"] and not row["method"].startswith("oracle")]
    if sharing:
        blocks.append(
            Drawing(
                f"{label} over the retrieval ratio",
                f"Score {metric} of {task}, and the gap of audited mass to the oracle of the same size (beta, lower is better), "
                "over the share of triples that ran a full retrieval. Bars are 95 % intervals.",
                draw=lambda: _over(sharing, metric, "retrieval_ratio", "retrieval ratio", (metric, "beta")),
                paper=("Figure 6",),
            )
        )
    points = [
        Point(
            family(row["method"]),
            row["scores"][metric]["mean"],
            (row["scores"][metric]["low"], row["scores"][metric]["high"]),
            share=row["bytes_share"],
            ms=None if row["seconds_per_token"] is None else row["seconds_per_token"] * 1e3,
        )
        for row in scored
    ]
    if any(point.share is not None for point in points):
        blocks.append(pareto(label, metric, points, 100))
    return blocks


def _scores(table: Row) -> Table:
    rows = table["rows"]
    metrics = list(rows[0]["scores"])
    aware = {None: "no question", True: "query-aware prefill", False: "question decoded"}[rows[0]["query_aware"]]
    header = [
        "method",
        *(text for metric in metrics for text in (metric, f"{metric}: to dense")),
        "same tokens",
        "KL to dense",
    ]
    found = []
    for row in rows:
        cells = [row["method"]]
        for metric in metrics:
            score = row["scores"][metric]
            difference = "" if row["method"] == "dense" else interval(score["difference"], 1, "+")
            cells += [interval(score, 1), "covered" if row["covered"] else difference]
        found.append([*cells, number(row["agreement"], 2), number(row["kl"] and row["kl"]["mean"], 4)])
    note = " ".join(f"{note[0].upper()}{note[1:]}." for note in table["notes"])
    note += " Differences to dense are paired by sample; those of perplexities are relative, in percent."
    return Table(f"{table['task']}: n = {rows[0]['n']}, {aware}", header, found, note.strip())


def _reading(table: Row) -> Table:
    found = []
    for row in table["rows"]:
        mass = row["retained_mass"]
        found.append(
            [
                row["method"],
                str(row["decoded"]),
                number(row["keys"], 0),
                number(row["bytes_per_token"], 2, 1e-6),
                "" if row["bytes_share"] is None else f"{row['bytes_share']:.0%}",
                number(row["retrieval_ratio"], 3),
                "" if mass is None else f"{interval(mass, 4)}, n {mass['n']}",
                interval(row["beta"], 4, "+"),
                number(row["seconds_per_token"], 1, 1e3),
            ]
        )
    return Table(f"{table['task']}: what was read in decode", _READING, found)


def _paper(task: str, rows: Sequence[Row]) -> list[Table]:
    """Return ours beside the paper's numbers of this task, if it has any."""
    if task not in paper.SCORES:
        return []
    theirs = paper.SCORES[task]
    ours, parts = list(rows[0]["scores"]), rows[0].get("split") or {}
    found = [
        [
            row["method"],
            *(interval(row["scores"][name], 1) for name in ours),
            *(interval(row["split"][part], 1) for part in parts),
            *(number(column.get(row["method"].partition(":")[0]), 2) for column in theirs.values()),
        ]
        for row in rows
    ]
    name = paper.TABLES[task]
    apart = [f"{part}, n = {own['n']}" for part, own in parts.items()]
    header = ("method", *ours, *apart, *(f"paper: {column}" for column in theirs))
    note = (
        "Methods at several budgets stand beside the one budget that the paper has; HShare at 28.1 % is hshare-1. The paper's"
        " CIS and CPE compare queries (gate=query)."
    )
    return [Table(f"{name}: {task}", header, found, note, paper=(name,))]


def _over(rows: Sequence[Row], metric: str, x: str, text: str, shown: Sequence[str]) -> Figure:
    figure, axes = panels(len(shown), 2.9)
    styles = method_styles(family(row["method"]) for row in rows)
    for axis, what in zip(axes, shown, strict=True):
        for name, look in styles.items():
            own = [
                (row[x], row["scores"][metric] if what == metric else row[what])
                for row in rows
                if family(row["method"]) == name
            ]
            own = sorted(((at, found) for at, found in own if at is not None and found), key=lambda pair: pair[0])
            if not own:
                continue
            ends = [
                [0.0 if found["low"] is None else found["mean"] - found["low"] for _, found in own],
                [0.0 if found["high"] is None else found["high"] - found["mean"] for _, found in own],
            ]
            xs, ys = [at for at, _ in own], [found["mean"] for _, found in own]
            axis.errorbar(xs, ys, yerr=ends, capsize=2, elinewidth=0.7, label=name, **look)
        axis.set(xlabel=text, ylabel=what)
        if what == metric:
            cap(axis, 100)
    legend(figure, axes[0])
    return figure
