"""``prehoc report``: one page of tables and figures from results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prehoc.cli import _common
from prehoc.files import atomic_path, check_writable


def command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Result files, folders of prehoc eval, traces; any number of them."),
    ],
    out: Annotated[Path, typer.Option("--out", help="HTML page to write; an existing one is replaced.")],
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Folder for every figure as SVG and PNG; made when it is missing.")
    ] = None,
    title: Annotated[str, typer.Option("--title", help="Heading of the page.")] = "prehoc report",
    as_json: _common.Json = False,
) -> None:
    """Draw results on one page that opens offline, beside the paper's numbers where it has them."""
    check_writable(out)
    if figures is not None and figures.exists() and not figures.is_dir():
        raise ValueError(f"{str(figures)!r} is a file; give a folder for --figures")
    from prehoc.plot.report import report
    from prehoc.plot.runs import read_run

    found = [read_run(path) for path in runs]
    if figures is not None:
        figures.mkdir(parents=True, exist_ok=True)
    with _common.progress() as progress:
        progress(f"drawing {len(found)} runs", 0, 0)
        page = report(found, figures, title)
    with atomic_path(out) as part:
        part.write_text(page, encoding="utf-8")
    if as_json:
        _common.emit_json({"out": str(out), "runs": [{"name": run.name, "kind": run.kind} for run in found]})
    else:
        print(f"written to {out}")
