"""What a setting of CIS costs and misses, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prehoc.files import atomic_path

LINES = {  # the key that varies along a line: name in the legend, and a marker and colour that are told apart by anyone
    "tau": ("gate tau", "o", "#0072b2"),
    "gate": ("the other gate", "v", "#56b4e9"),
    "no gate": ("block size s without a gate", "s", "#e69f00"),
    "block_size": ("block size s", "^", "#009e73"),
    "dilate": ("dilation m, its neighbours r=1", "D", "#cc79a7"),
}


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Plot the retained mass over the bytes read, a panel per budget, and save the picture.

    Parameters
    ----------
    document : mapping
        What ``prehoc tune cis`` wrote.
    path : Path
        A png, svg or pdf file.

    Raises
    ------
    ValueError
        As `check_target`.
    """
    kind = check_target(path)
    from matplotlib.figure import Figure

    budgets = document["budgets"]
    columns = min(len(budgets), 2)
    lines = -(-len(budgets) // columns)
    figure = Figure(figsize=(5.2 * columns, 4.2 * lines), layout="constrained")
    for number, (axes, budget) in enumerate(
        zip(figure.subplots(lines, columns, squeeze=False).flat, budgets, strict=False)
    ):
        rows = [row for row in document["rows"] if row["budget"] == budget and row["varies"] != "reference"]
        base = next(row for row in rows if row["varies"] == "none")
        _panel(axes, rows, base)
        axes.set(title=f"{budget} keys", xlabel="bytes read, share of dense")
        if number % columns == 0:
            axes.set_ylabel("retained attention mass")
        if number == 0:
            axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.suptitle(f"CIS on {document['model']}, {document['prompt_tokens']} tokens of context", fontsize=10)
    with atomic_path(path) as part:
        figure.savefig(part, format=kind, dpi=150)


def check_target(path: Path) -> str:
    """Return the kind of picture that `path` asks for.

    Raises
    ------
    ValueError
        When matplotlib is missing or does not know the kind.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("plots need matplotlib: pip install 'prehoc[plot]'") from error
    kind = path.suffix.lstrip(".").lower()
    if kind not in Figure().canvas.get_supported_filetypes():
        raise ValueError(f"matplotlib cannot write {path.name!r}; give a .png, .svg or .pdf file")
    return kind


def varied(base: Mapping[str, Any]) -> str:
    """Return what a sweep varies: the method of its row ``defaults`` without its budget."""
    name, _, pairs = str(base["method"]).partition(":")
    kept = ",".join(pair for pair in pairs.split(",") if pair and not pair.startswith("budget="))
    return f"{name}:{kept}" if kept else name


def _panel(axes: Any, rows: list[Mapping[str, Any]], base: Mapping[str, Any]) -> None:
    axes.axhline(base["oracle"]["mean"], color="0.5", linestyle="--", linewidth=1, label="oracle")
    for varies, (name, marker, colour) in LINES.items():
        line = [row for row in rows if row["varies"] == varies]
        if not line:
            continue
        line += [base] if varies not in ("gate", "no gate") else []
        line.sort(key=lambda row: (row["bytes_share"], row["label"]))
        xs, ys = [row["bytes_share"] for row in line], [row["retained"]["mean"] for row in line]
        if varies == "gate":
            name = f"{line[0]['label'].partition(',')[0]}, tau"
        axes.plot(xs, ys, marker=marker, color=colour, markersize=4, linewidth=1.2, label=name)
        for x, y, row in zip(xs, ys, line, strict=True):
            if row is not base and varies != "block_size":  # these lie on each other
                text = row["label"].removesuffix(", no gate").rpartition(", ")[2]  # of the other gate its tau
                offset, side = ((-5, 4), "right") if varies == "tau" else ((5, -9), "left")
                axes.annotate(
                    text, (x, y), textcoords="offset points", xytext=offset, ha=side, fontsize=7, color=colour
                )
    axes.plot([base["bytes_share"]], [base["retained"]["mean"]], "k*", markersize=10, label=varied(base))
