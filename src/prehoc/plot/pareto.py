"""What is kept against what is paid: a value over bytes read and over time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prehoc.plot.page import Drawing, cap, legend, method_styles, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Point:
    """One method in one setting.

    Parameters
    ----------
    method : str
        Points of one method are joined by a line and share a marker.
    value : float
        What is kept.
    ends : (float or None, float or None)
        Its interval, if it has one.
    share : float or None
        Bytes read, as a share of dense.
    ms : float or None
        Time of a token.
    """

    method: str
    value: float
    ends: tuple[float | None, float | None] = (None, None)
    share: float | None = None
    ms: float | None = None


def pareto(title: str, label: str, points: Sequence[Point], most: float = 1.0) -> Drawing:
    """Return the figure of `label` over bytes, and over time where there are times.

    Parameters
    ----------
    title : str
        What was run.
    label : str
        What the values are.
    points : sequence of Point
        Left out of a panel where they lack its x.
    most : float
        The largest value there can be: a share's, 100 of a score in percent.
    """
    timed = any(point.ms is not None for point in points)
    return Drawing(
        f"Pareto: {title}",
        f"{label[0].upper()}{label[1:]} against the bytes that attention and selection read, as a share of dense"
        + (", and against time" if timed else "")
        + ". Up and to the left is better; a line joins the budgets of one method.",
        draw=lambda: _draw(label, points, most),
        paper=("Pareto",),
    )


def _draw(label: str, points: Sequence[Point], most: float) -> Figure:
    axes_of = [
        (name, text)
        for name, text in (("share", "bytes read, share of dense"), ("ms", "ms per token"))
        if any(getattr(p, name) is not None for p in points)
    ]
    figure, axes = panels(len(axes_of), 3.2)
    styles = method_styles(point.method for point in points)
    for axis, (name, text) in zip(axes, axes_of, strict=True):
        for method, look in styles.items():
            own = [(getattr(p, name), p) for p in points if p.method == method and getattr(p, name) is not None]
            own.sort(key=lambda pair: pair[0])
            xs, ys = [x for x, _ in own], [p.value for _, p in own]
            bars = [[0.0 if end is None else abs(end - p.value) for end in p.ends] for _, p in own]
            axis.errorbar(xs, ys, yerr=list(zip(*bars, strict=True)), capsize=2, elinewidth=0.7, label=method, **look)
        axis.set(xlabel=text, ylabel=label)
        cap(axis, most)
    legend(figure, axes[0])
    return figure


def family(method: str) -> str:
    """Return a method without its budget: what its settings have in common."""
    name, _, keys = method.partition(":")
    rest = [key for key in keys.split(",") if key and key.split("=")[0] not in ("budget", "ratio", "critical", "mass")]
    return f"{name}:{','.join(rest)}" if rest else name
