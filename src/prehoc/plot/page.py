"""One HTML page that opens offline: sections of tables and figures, readable on a phone and without colours."""

from __future__ import annotations

import dataclasses
import itertools
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from prehoc.files import atomic_path
from prehoc.methods import METHODS, PRESETS
from prehoc.plot.cis import check_target

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 4.8
"""Inches of a figure: its letters stay readable when a phone shows it."""
# colours of Okabe and Ito; whoever does not see them has the markers, dashes and hatches
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "osD^vPX*<>"
DASHES = ("-", "--", "-.", ":")
# a row for each run through the colours: variants of a method, and rivals of one kind, share a colour
_ORDER = (
    *("cis", "cpe", "oracle", "hshare-1", "quest", "h2o", "dense"),
    *("cis-8", "cpe-8", "oracle_topp", "hshare-2", "double_sparsity", "snapkv", "streaming"),
    *("cis-16", "cpe-16", "direct_reuse", "hshare_matched", "random_expansion", "psaw", "etf"),
)
HATCHES = ("", "////", "\\\\\\\\", "xxxx")
_RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9,
    "legend.fontsize": 8,
    "axes.titlesize": 9,
    "svg.hashsalt": "prehoc",
}


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of texts.

    Parameters
    ----------
    caption : str
        What it shows.
    header : sequence of str
        Its columns, the first of which names the rows.
    rows : sequence of sequence of str
        Its cells.
    note : str
        How to read it.
    folded : bool
        Whether the reader opens it first.
    paper : tuple of str
        The tables of the paper that it answers, as `prehoc.plot.paper.PARTS` names them.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    folded: bool = False
    paper: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A figure that is drawn when the page is.

    Parameters
    ----------
    title : str
        Its heading.
    alt : str
        What it shows, for whoever does not see it, and as its caption.
    draw : callable, optional
        Returns a matplotlib figure.
    save : callable, optional
        In place of `draw`: writes the picture to a path.
    paper : tuple of str
        The figures of the paper that it answers, as `prehoc.plot.paper.PARTS` names them.
    """

    title: str
    alt: str
    draw: Callable[[], Figure] | None = None
    save: Callable[[Path], None] | None = None
    paper: tuple[str, ...] = ()


Block = Table | Drawing


@dataclasses.dataclass(frozen=True)
class Section:
    """What one run says.

    Parameters
    ----------
    title : str
        Its heading.
    facts : sequence of (str, str)
        Where its numbers come from: command, machine, versions.
    blocks : sequence of Table or Drawing
        What it shows.
    warning : str
        What must be known before anything is read.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    blocks: Sequence[Block]
    warning: str = ""


def style(number: int) -> dict[str, Any]:
    """Return colour, marker and dashes of the n-th line of a figure."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": DASHES[number // len(COLOURS) % len(DASHES)],
        "markersize": 5,
        "linewidth": 1.2,
    }


def method_styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the style of each method's line, the same in every figure.

    A name that differs from one before it only in its keys has its colour; what is no method has a style behind those of all.
    """
    places = {name: place for place, name in enumerate(dict.fromkeys([*_ORDER, *METHODS, *PRESETS]))}
    found: dict[str, int] = {}
    for name in dict.fromkeys(names):
        own = places.get(name.partition(":")[0])
        number = own
        if number is None or number in found.values():
            free = (n for n in itertools.count(len(places)) if n not in found.values())
            number = next(n for n in free if own is None or (n - own) % len(COLOURS) == 0)
        found[name] = number
    return {name: style(number) for name, number in found.items()}


def cap(axis: Any, most: float) -> None:
    """End a vertical axis at the largest value there can be, where nothing but its margin lies beyond."""
    if axis.dataLim.y1 <= most < axis.get_ylim()[1]:
        axis.set_ylim(top=most)
        for drawn in (*axis.lines, *axis.collections):
            drawn.set_clip_on(False)  # the markers on the edge stay whole


def panels(count: int, height: float = 2.6) -> tuple[Figure, list[Any]]:
    """Return a figure with `count` axes, one above the other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height * count), layout="constrained")
    return figure, list(figure.subplots(count, 1, squeeze=False)[:, 0])


def legend(figure: Figure, axes: Any) -> None:
    """Put the legend of one of its axes below a figure."""
    handles, labels = axes.get_legend_handles_labels()
    longest = max(map(len, labels), default=0)
    columns = 3 if longest < 16 else 2 if longest < 28 else 1
    width, height = figure.get_size_inches()
    figure.set_size_inches(
        width, height + 0.17 * (-(-len(labels) // columns))
    )  # the legend takes nothing from the axes
    figure.legend(handles, labels, frameon=False, ncols=columns, loc="outside lower center")


def number(value: float | None, digits: int, factor: float = 1.0) -> str:
    """Return a value for a table, nothing for none."""
    return "" if value is None else f"{value * factor:.{digits}f}"


def interval(found: Mapping[str, float | None] | Sequence[float | None] | None, digits: int, sign: str = "") -> str:
    """Return a mean with its interval, as a mapping of mean, low and high or as these three; nothing for none."""
    if found is None:
        return ""
    mean, low, high = (found[key] for key in ("mean", "low", "high")) if isinstance(found, Mapping) else found
    if mean is None:
        return ""
    form = f"{sign}.{digits}f"
    return f"{mean:{form}}" + ("" if low is None or high is None else f" [{low:{form}}, {high:{form}}]")


def render(title: str, sections: Sequence[Section], missing: Sequence[tuple[str, str]], folder: Path | None) -> str:
    """Return the page.

    Parameters
    ----------
    title : str
        Its heading.
    sections : sequence of Section
        In their order.
    missing : sequence of (str, str)
        Figures that could not be drawn, and what would be needed.
    folder : Path or None
        Where every figure is written too, as SVG and PNG.

    Returns
    -------
    str
        HTML with everything inside.

    Raises
    ------
    ValueError
        When matplotlib is missing.
    """
    check_target(Path("figure.svg"))
    count = 0

    def picture(drawing: Drawing) -> str:
        nonlocal count
        count += 1
        return _picture(drawing, f"figure{count}", folder)

    text = template("report.html").render(
        title=title, sections=sections, missing=missing, picture=picture, table=lambda block: isinstance(block, Table)
    )
    return str(text)


def template(name: str) -> jinja2.Template:
    """Return a template of this package; whatever is put into it is escaped."""
    source = resources.files("prehoc.plot").joinpath(name).read_text(encoding="utf-8")
    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(source)


def _picture(drawing: Drawing, key: str, folder: Path | None) -> str:
    """Return a figure as inline SVG; with a folder, write it there as SVG and PNG."""
    import matplotlib

    slug = re.sub(r"[^a-z0-9]+", "-", drawing.title.lower()).strip("-")[:60]
    with matplotlib.rc_context(_RC), tempfile.TemporaryDirectory() as scratch:
        save = _saver(drawing)
        save(Path(scratch) / "figure.svg")
        svg = (Path(scratch) / "figure.svg").read_text(encoding="utf-8")
        if folder is not None:
            for kind in ("svg", "png"):
                save(folder / f"{key}-{slug}.{kind}")
    return _inline(svg, key, drawing)


def _saver(drawing: Drawing) -> Callable[[Path], None]:
    if drawing.draw is None:
        assert drawing.save is not None
        return drawing.save
    figure = drawing.draw()

    def save(path: Path) -> None:
        with atomic_path(path) as part:
            figure.savefig(part, format=path.suffix[1:], dpi=150)

    return save


def _inline(svg: str, key: str, drawing: Drawing) -> str:
    """Return an SVG file as an element of a page: no headers, no names shared with others, with a title."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.S)
    body = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", body)  # known to HTML, and the only addresses in it
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{key}-", body)
    start, end = re.search(r"<svg[^>]*>", body).span()  # type: ignore[union-attr]
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', body)[1])  # type: ignore[index]
    box = re.search(r'viewBox="[^"]*"', body)[0]  # type: ignore[index]
    wide = f' style="min-width: {width * 0.9:.0f}px"' if width > WIDTH * 72 * 1.2 else ""  # scrolls inside its box
    head = f'<svg role="img" aria-labelledby="{key}-title {key}-alt"{wide} {box}>'
    names = f'<title id="{key}-title">{escape(drawing.title)}</title><desc id="{key}-alt">{escape(drawing.alt)}</desc>'
    return head + names + body[end:]
