"""What the commands share: option types, progress on stderr, one JSON document on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from prehoc import config

show_traceback = False
"""Set by ``prehoc --traceback``."""

Model = Annotated[str, typer.Option("--model", help="Catalogue name, local folder, .gguf file, or hub id owner/name.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto (as stored), float32, bfloat16 or float16.")]
Backend = Annotated[str | None, typer.Option("--backend", help="auto, cpu (C++), triton or reference (torch).")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="CPU threads; torch's own choice when not given.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Seed of everything random.")]
Pack = Annotated[
    bool,
    typer.Option(
        "--pack", help="Multiply by packed copies of the weights: faster on CPUs, and the weights twice in memory."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; everything else goes to stderr.")]


def log(message: str) -> None:
    """Print a line for the reader on stderr."""
    print(message, file=sys.stderr, flush=True)


def check_device(name: str) -> None:
    """Raise ValueError unless torch can run on this kind of device here."""
    config.check_choice("device", name, ("cpu", "cuda"))
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' is not available to torch here; use cpu")


def check_backend(name: str | None, device: str = "cpu") -> None:
    """Raise ValueError unless kernels of this backend can run on this kind of device, before any weights are loaded.

    What `auto` can run, and whether C++ kernels compile, is seen when they are needed: a build may take a minute.
    """
    import torch

    from prehoc import kernels

    asked = config.default_backend() if name is None else name
    if asked != "auto" and (device, asked) != ("cpu", "cpu"):
        kernels.resolve(asked, torch.device(device))


def emit_json(document: Any) -> None:
    """Print one JSON document on stdout; NaN and infinity, which JSON does not have, are refused."""
    print(json.dumps(document, indent=2, allow_nan=False))


def show(table: Table) -> None:
    """Print a table on stdout with every number and every word of a heading whole.

    A file has no width of its own. On a terminal that is too narrow, headings break at spaces, and what is still too wide runs
    over the edge.
    """
    terminal, wide = Console(), Console(width=100_000)
    width = Measurement.get(wide, wide.options, table).maximum
    if terminal.is_terminal and terminal.width < width:
        for column in table.columns:
            cells = [Measurement.get(wide, wide.options, cell) for cell in (column.header, *column.cells)]
            column.width = max(cell.minimum for cell in cells)
        width = Measurement.get(wide, wide.options, table).maximum
    Console(width=max(width, terminal.width) if terminal.is_terminal else width).print(table)


def setup(threads: int | None = None, seed: int | None = None) -> None:
    """Apply ``--threads`` and ``--seed`` to torch."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()  # it would run through our own
    if threads is not None:
        torch.set_num_threads(threads)
    if seed is not None:
        torch.manual_seed(seed)


@contextmanager
def resumable(kept: Path | None) -> Iterator[None]:
    """Tell whoever stops the block with Ctrl-C that the same command goes on from what is `kept` (None: nothing is)."""
    try:
        yield
    except KeyboardInterrupt:
        if kept is not None:
            log(f"interrupted: what is finished is kept in {kept}; the same command goes on where it was")
        raise typer.Exit(130) from None


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show bars on stderr for as long as the block runs; yields ``report(stage, done, total)``.

    A `total` of 0 means an unknown amount of work. Where stderr is not a terminal, each stage is one line.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        seen: set[str] = set()

        def line(stage: str, done: int, total: int) -> None:
            if stage not in seen:
                seen.add(stage)
                log(f"{stage} ...")

        yield line
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def bar(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                for task in tasks.values():  # a new stage begins when the one before has ended
                    whole = bars.tasks[task].total or 1
                    bars.update(task, total=whole, completed=whole)
                tasks[stage] = bars.add_task(stage, total=total or None)
            bars.update(tasks[stage], completed=done)

        yield bar
        for task in tasks.values():
            whole = bars.tasks[task].total or 1
            bars.update(task, total=whole, completed=whole)
