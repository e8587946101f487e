"""What the speed benchmarks say: Tables IV and V in our numbers, and what a step or a prompt costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prehoc.plot import paper
from prehoc.plot.page import (
    COLOURS,
    HATCHES,
    WIDTH,
    Block,
    Drawing,
    Table,
    legend,
    method_styles,
    number,
    panels,
)
from prehoc.plot.pareto import Point, pareto
from prehoc.plot.runs import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
PARTS = ("selection", "attention", "rest")


def attention(run: Run) -> list[Block]:
    """Return the tables and the figure of ``prehoc bench attention``."""
    cells = [cell for cell in run.document["cells"] if "rows" in cell]
    settings = run.document["settings"]
    blocks: list[Block] = [
        Drawing(
            "Attention operator: times faster than dense",
            "Whole operator of a decode step (gate, retrieval, dilation, attention), dense divided by each row, over the "
            "cached tokens; a panel per shape and batch. Above 1 is faster than our dense attention.",
            draw=lambda: _speedups(cells),
        )
    ]
    samples = f"{settings['steps']} steps, {settings['rounds']} rounds"
    blocks += [_attention_table(cell, samples) for cell in cells]
    blocks.append(_paper_table("Table IV", "the paper's rows on an A100 (LLaMA2-7B shapes): times its Flash row", 0))
    skipped = [
        (f"{shape_and_batch(cell)} x {cell['length']}", cell["skipped"])
        for cell in run.document["cells"]
        if "skipped" in cell
    ]
    if skipped:
        blocks.append(Table("Cells that were not run", ("cell", "why"), skipped))
    return blocks


def shape_and_batch(cell: Row) -> str:
    """Return shape and batch of a cell, without its length."""
    shape = cell["shape"]
    return f"{shape['name']} ({shape['heads']}/{shape['kv_heads']} x {shape['dim']}), batch {cell['batch']}"


def _attention_table(cell: Row, samples: str) -> Table:
    theirs = paper.ATTENTION_MS.get((cell["batch"], cell["length"])) if cell["shape"]["name"] == "llama2-7b" else None
    rows, notes = [], [f"n = {samples}, {len(cell['layers'])} layers; 10-90 % over the rounds."]
    for row in cell["rows"]:
        if "why" in row:
            notes.append(f"{row['row']} did not run: {row['why']}.")
            continue
        place = paper.column(row["row"])
        rows.append(
            [
                row["row"],
                f"{row['ms']:.3f}",
                f"{row['ms_10']:.3f}-{row['ms_90']:.3f}",
                number(row.get("selection_ms"), 3),
                number(row["attention_ms"], 3),
                number(row["bytes_read"], 2, 1e-6),
                number(row["stream_percent"], 0),
                number(row.get("retrieval_ratio"), 2),
                number(row["keys_per_head"], 0),
                number(row["times_dense"], 2),
                number(row["times_sdpa"], 2),
                "" if theirs is None or place is None else f"{theirs[0] / theirs[place]:.2f}",
            ]
        )
    header = (
        "row",
        "ms",
        "10-90 %",
        "selection",
        "attention",
        "MB",
        "% stream",
        "rho",
        "keys",
        "x dense",
        "x sdpa",
        "paper: x Flash",
    )
    return Table(
        f"Table IV in our numbers: {shape_and_batch(cell)} x {cell['length']}",
        header,
        rows,
        " ".join(notes),
        paper=("Table IV",),
    )


def _speedups(cells: Sequence[Row]) -> Figure:
    groups = grouped(cells, lambda cell: (shape_and_batch(cell),))
    styles = method_styles(row["row"] for cell in cells for row in cell["rows"] if "ms" in row)
    figure, axes = panels(len(groups), 2.8)
    for axis, ((title,), some) in zip(axes, groups.items(), strict=True):
        for name, look in styles.items():
            points = [
                (cell["length"], row["times_dense"])
                for cell in some
                for row in cell["rows"]
                if row["row"] == name and "ms" in row
            ]
            if name != "dense" and points:
                axis.plot(*zip(*sorted(points), strict=True), label=name, **look)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(title=title, ylabel="times dense's speed", xscale="log", yscale="log")
        lengths = sorted({cell["length"] for cell in some})
        axis.set_xticks(lengths, [str(length) for length in lengths])
        axis.minorticks_off()
        _plain_ticks(axis)
    axes[-1].set_xlabel("cached tokens")
    legend(figure, axes[0])
    return figure


def grouped(items: Iterable[Row], key: Callable[[Row], tuple[Any, ...]]) -> dict[tuple[Any, ...], list[Row]]:
    """Return the items by key, in the order in which each key appears first."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def _plain_ticks(axis: Any) -> None:
    """Write a logarithmic y axis in plain numbers."""
    ticks = [
        tick
        for tick in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
        if axis.get_ylim()[0] <= tick <= axis.get_ylim()[1]
    ]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])


def decode(run: Run) -> list[Block]:
    """Return the tables and figures of ``prehoc bench decode``."""
    cells = run.document["cells"]
    split = [cell for cell in cells if any("attention_ms" in row for row in cell["rows"])]
    blocks: list[Block] = []
    if split:
        blocks.append(
            Drawing(
                "Decode step by part",
                "Milliseconds of a decode step: selection, attention and the rest of the model; stock transformers "
                "(sdpa) as one piece. A panel per batch and context.",
                draw=lambda: _steps(cells),
            )
        )
    blocks += [_decode_table(cell) for cell in cells]
    points = [
        Point(
            row["system"],
            1.0 if row["system"] == "dense" else row["retained_mass"],
            share=row["bytes_per_step"] / row["dense_bytes_per_step"],
            ms=row["step_ms"] / cell["batch"],
        )
        for cell in cells
        for row in cell["rows"]
        if row["system"] == "dense" or row.get("retained_mass") is not None
    ]
    if len({point.method for point in points}) > 1:
        blocks.append(pareto("decode steps", "retained attention mass, audited", points))
    blocks.append(
        _paper_table("Table V", "the paper's decode throughput on an A100: times GPT-Fast, a dense engine", 1)
    )
    return blocks


def _decode_table(cell: Row) -> Table:
    theirs = paper.DECODE_TOKENS.get((cell["batch"], cell["context"]))
    rows = []
    for row in cell["rows"]:
        place = paper.column(row["system"])
        dense = row.get("dense_bytes_per_step")
        mass = number(row.get("retained_mass"), 4)
        rows.append(
            [
                row["system"],
                f"{row['step_ms']:.1f}",
                f"{row['step_ms_10']:.1f}-{row['step_ms_90']:.1f}",
                f"{cell['batch'] / row['step_ms'] * 1e3:.1f}",
                *(number(row.get(f"{part}_ms"), 1) for part in PARTS),
                number(row["times_dense"], 2),
                number(row.get("keys_per_head"), 0),
                number(row.get("bytes_per_step"), 1, 1e-6),
                "" if not dense else f"{row['bytes_per_step'] / dense:.1%}",
                number(row.get("retrieval_ratio"), 2),
                mass and f"{mass}, n {row['audited']}",
                "" if row.get("prefill_of") else f"{row['prefill_seconds']:.2f}",
                "" if theirs is None or not place else f"{theirs[place] / theirs[0]:.2f}",
            ]
        )
    header = (
        "system",
        "ms",
        "10-90 %",
        "tokens/s",
        *PARTS,
        "x dense",
        "keys",
        "MB",
        "of dense",
        "rho",
        "mass audited",
        "prefill s",
        "paper: x GPT-Fast",
    )
    steps = sorted({row["steps"] for row in cell["rows"]})
    note = f"Medians of n = {' to '.join(map(str, steps))} steps, 10-90 % over them; parts were timed in a round of their own."
    return Table(
        f"Table V in our numbers: {cell['batch']} x {cell['context']} tokens", header, rows, note, paper=("Table V",)
    )


def _steps(cells: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    rows = [len(cell["rows"]) for cell in cells]
    figure = Figure(figsize=(WIDTH, 0.33 * sum(rows) + 0.9 * len(cells)), layout="constrained")
    axes = figure.subplots(len(cells), 1, squeeze=False, height_ratios=rows)[:, 0]
    for axis, cell in zip(axes, cells, strict=True):
        names = [row["system"] for row in cell["rows"]]
        left = [0.0] * len(names)
        for index, part in enumerate(PARTS):
            sizes = [row.get(f"{part}_ms", 0.0) for row in cell["rows"]]
            axis.barh(
                names, sizes, left=left, color=COLOURS[index], hatch=HATCHES[index + 1], edgecolor="white", label=part
            )
            left = [begin + size for begin, size in zip(left, sizes, strict=True)]
        whole = [0.0 if "attention_ms" in row else row["step_ms"] for row in cell["rows"]]
        axis.barh(names, whole, color="0.75", edgecolor="black", label="not divided")
        axis.invert_yaxis()
        axis.set(title=f"{cell['batch']} x {cell['context']} tokens", xlabel="ms")
    legend(figure, axes[0])
    return figure


def _paper_table(part: str, what: str, form: int) -> Table:
    """Return the paper's table as ratios: of times (form 0) or of throughputs (form 1) to its first column."""
    numbers: dict[tuple[int, int], tuple[float, ...]] = dict(paper.DECODE_TOKENS if form else paper.ATTENTION_MS)
    rows = [
        [f"{batch} x {length}", *(f"{(one / found[0] if form else found[0] / one):.2f}" for one in found[1:])]
        for (batch, length), found in numbers.items()
    ]
    return Table(f"{part}: {what}", ("batch x length", *paper.COLUMNS[1:]), rows, folded=True)
