"""``prehoc inspect``: an interactive page of one trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prehoc.cli import _common
from prehoc.files import atomic_path, check_writable


def command(
    trace: Annotated[
        Path,
        typer.Argument(metavar="TRACE.npz", help="A trace recorded with --record selections --record qk."),
    ],
    out: Annotated[Path, typer.Option("--out", help="HTML page to write; an existing one is replaced.")],
    as_json: _common.Json = False,
) -> None:
    """Write a page to pick a layer and head of a trace on, and see which keys each step read, chose and missed."""
    check_writable(out)
    from prehoc.plot.inspect import inspect
    from prehoc.trace import Trace

    found = Trace.load(trace)
    with _common.progress() as report:
        page = inspect(found, f"prehoc inspect: {trace.name}", report)
    with atomic_path(out) as part:
        part.write_text(page, encoding="utf-8")
    if as_json:
        _common.emit_json({"out": str(out), "trace": trace.name, "meta": found.meta, "summary": found.summary()})
    else:
        print(f"written to {out}")
