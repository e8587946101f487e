"""``prehoc bench attention``: the attention operator of one decode step of one layer, dense beside every method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from prehoc.bench import memory
from prehoc.bench.held import Held
from prehoc.bench.inputs import Inputs, Shape
from prehoc.bench.lineup import make_rows
from prehoc.bench.measured import Measured
from prehoc.bench.refcheck import check_rows
from prehoc.bench.rows import MethodRow, ReadRow, Row, SdpaRow
from prehoc.selection import Rows, Step

SAMPLES = 8
"""Steps, over all layers of a round, at which rows of fixed work are run."""
HOPELESS = 5
"""Times the fastest of torch's kernels: one whose first call takes longer, and over a second, is not measured."""
LEAD = 1
"""Untimed steps before the first timed one: what a method builds once, behind the prompt, is no work of a step."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of the table."""

    shape: Shape
    batch: int
    length: int

    def __str__(self) -> str:
        return f"{self.shape.name} {self.batch} x {self.length}"


@dataclasses.dataclass(frozen=True)
class Setup:
    """How every cell is measured.

    Parameters
    ----------
    methods : tuple of str
        Method strings; torch's attention, FlexAttention and dense are always measured.
    dtype : dtype
        Of queries, keys and values.
    backend : str
        Kernel backend, resolved.
    steps, rounds : int
        Timed decode steps in a row, and how often they are repeated.
    layers : int or None
        Layers to run, evenly spaced over the depth; None: all.
    refcheck : bool
        Compare every row with the reference backend first.
    device : device
        Where to run.
    """

    methods: tuple[str, ...]
    dtype: torch.dtype
    backend: str
    steps: int = 32
    rounds: int = 3
    layers: int | None = None
    refcheck: bool = False
    device: torch.device = torch.device("cpu")

    def chosen(self, shape: Shape) -> list[int]:
        """Return the layers to run: the middles of equal parts of the depth."""
        count = shape.layers if self.layers is None else min(self.layers, shape.layers)
        return [(2 * i + 1) * shape.layers // (2 * count) for i in range(count)]


def misfit(cell: Cell, setup: Setup) -> str | None:
    """Return why a cell does not fit into the free memory, None if it does."""
    free = memory.free_bytes(setup.device)
    source = 2 * cell.shape.kv_heads * cell.length * cell.shape.dim * 4  # one sequence in float32
    beside = memory.YARDSTICK[setup.device.type] + 2**28
    need = cell.shape.kv_bytes(cell.batch, cell.length, setup.dtype) + 2 * source + beside
    if free is not None and need > free:
        return f"needs {need / 2**30:.1f} GiB of memory, {free / 2**30:.1f} are free"
    return None


def bench_cell(
    cell: Cell,
    inputs: Inputs,
    setup: Setup,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    rows: Sequence[Row] | None = None,
    stream: Callable[[], float] = lambda: 0.0,
) -> dict[str, Any]:
    """Measure one cell.

    All rows decode the same consecutive steps of every chosen layer, in an order that rotates, each with the selection state
    that it would have there. A row's time is the mean over layers and steps of the median over the rounds: retrievals are
    amortised over the steps that share them.

    Parameters
    ----------
    cell : Cell
        What to measure.
    inputs : Inputs
        Where queries, keys and values come from.
    setup : Setup
        How.
    progress : callable
        Called with (stage, done, total).
    rows : sequence of Row, optional
        What to measure in place of the setup's methods and what stands beside them.
    stream : callable
        Measures the bandwidth of the memory in bytes per second. It is called between the rounds, and its best counts: other
        tenants of a host double or halve it within minutes.

    Returns
    -------
    dict
        Ready for JSON: facts of the cell and its rows, or why it was skipped.

    Raises
    ------
    RefcheckError
        When a row's output or selection is not that of the reference backend.
    """
    layers = setup.chosen(cell.shape)
    facts: dict[str, Any] = {"shape": dataclasses.asdict(cell.shape), "batch": cell.batch, "length": cell.length}
    if (why := misfit(cell, setup)) is not None:
        return facts | {"skipped": why}
    kv_bytes = cell.shape.kv_bytes(cell.batch, cell.length, setup.dtype)
    if rows is None:
        rows = make_rows(list(setup.methods), cell.length, kv_bytes, setup.dtype, setup.backend, setup.device)
    measured = [Measured(row) for row in rows]
    with torch.inference_mode():
        held = Held.of(cell, setup, len(layers))
        runner = _Runner(cell, inputs, setup, held, measured)
        runner.warm(layers[0])
        if setup.refcheck:
            for layer in dict.fromkeys((layers[0], layers[-1])):
                progress(f"{cell}: checking layer {layer} against the reference", 0, 0)
                runner.check(layer)
        done, fastest = 0, stream()
        for begin in range(0, len(layers), held.layers):
            chunk = layers[begin : begin + held.layers]
            runner.load(chunk)
            for turn in range(setup.rounds):
                progress(str(cell), done, len(layers) * setup.rounds)
                runner.round(turn, begin)
                fastest = max(fastest, stream())
                done += len(chunk)
    return facts | {
        "layers": layers,
        "stream_bytes_per_second": fastest,
        "held_layers": held.layers,
        "held_cache_sizes": round(
            kv_bytes * len(held.copies) * len(held.copies[0]) / memory.last_cache_bytes(setup.device), 1
        ),
        "rows": [one.result() for one in measured],
    }


class _Runner:
    """The layers in memory, and the loops over them."""

    def __init__(self, cell: Cell, inputs: Inputs, setup: Setup, held: Held, measured: list[Measured]) -> None:
        self._cell, self._inputs, self._setup, self._held, self._all = cell, inputs, setup, held, measured
        self._chunk: list[int] = []
        self._queries: list[Tensor] = []
        self._calls = 0

    @property
    def _running(self) -> list[Measured]:
        return [one for one in self._all if not one.why]

    def load(self, layers: list[int]) -> None:
        """Put layers into memory."""
        self._chunk, self._queries = layers, []
        for slot, layer in enumerate(layers):
            found = self._inputs.layer(self._cell.shape, layer, self._cell.length, self._setup.steps + LEAD)
            self._held.fill(slot, found)
            q = found.q[:, None].expand(-1, self._cell.batch, -1, -1)  # [S, B, H, D]
            self._queries.append(q.to(self._setup.device, self._setup.dtype).contiguous())

    def step(self, row: Row, slot: int, number: int) -> Step:
        """Return step `number` (below `LEAD`: untimed) of a held layer as a row sees it, in the copy whose turn it is."""
        cell, setup, layer = self._cell, self._setup, self._chunk[slot]
        prompt = cell.length - setup.steps - LEAD
        total = prompt + number + 1
        copies = self._held.copies[slot]
        k, v = copies[self._calls % len(copies)]
        self._calls += 1
        plan = row.plan if isinstance(row, MethodRow) else None
        hidden = plan.window.masked(layer, cell.shape.layers) if plan and plan.window else None
        return Step(
            layer,
            self._queries[slot][number],
            k[:, :, :total],
            v[:, :, :total],
            cell.shape.dim**-0.5,
            Rows((0,) * cell.batch, (prompt,) * cell.batch),
            ((hidden(total) if hidden else 0),) * cell.batch,
            setup.backend,
            # methods that share between layers share between those that are held together
            row.states(self._chunk) if isinstance(row, MethodRow) else {},
        )

    def warm(self, layer: int) -> None:
        """Run every row once; torch's rows that cannot run, or lack the memory, say why instead."""
        self.load([layer])
        first: dict[Measured, float] = {}
        for one in self._all:
            if hasattr(one.row, "method"):
                one.row.run(self.step(one.row, 0, 0))
                continue
            free = memory.free_bytes(self._setup.device)
            if free is not None and one.row.extra_bytes > free:
                one.why = f"needs {one.row.extra_bytes / 2**30:.1f} GiB more, {free / 2**30:.1f} are free"
                continue
            try:
                one.row.begin()
                _, _, parts = one.row.run(self.step(one.row, 0, 0))
            except Exception as error:  # whatever torch's compilers raise
                one.why = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
                continue
            if isinstance(one.row, SdpaRow):
                first[one] = parts["attention"]
        for one, seconds in first.items():
            if seconds > max(HOPELESS * min(first.values()), 1.0):
                one.why = f"its first call took {seconds:.1f} s, {seconds / min(first.values()):.0f} times the fastest kernel's"

    def check(self, layer: int) -> None:
        """Compare every row with the reference on one layer."""
        self.load([layer])
        for one in self._running:
            if isinstance(one.row, ReadRow):
                continue  # a yardstick has no output
            one.row.begin()
            last = 1 if one.row.fixed else min(self._setup.steps, 10)
            steps = [self.step(one.row, 0, number) for number in range(LEAD + last)]
            found = check_rows(one.row, steps)
            one.checked = {name: _worse(name, value, one.checked) for name, value in found.items()}

    def round(self, turn: int, first: int) -> None:
        """Run all steps of the held layers once; `first` is the number of layers run before these."""
        setup, running = self._setup, self._running
        total = len(setup.chosen(self._cell.shape)) * setup.steps
        stride = max(total // SAMPLES, 1) | 1  # odd: not always the same step of a block
        for one in running:
            one.row.begin()
        for number in range(setup.steps + LEAD):
            shift = (turn + number) % len(running)
            for one in running[shift:] + running[:shift]:
                for slot, layer in enumerate(self._chunk):
                    step = self.step(one.row, slot, number)
                    point = (first + slot) * setup.steps + number - LEAD
                    if number < LEAD or (one.row.fixed and point % stride):
                        one.row.skip(step)
                        continue
                    _, decision, parts = one.row.run(step)
                    one.enter(step, (layer, number), parts, decision)


def _worse(name: str, value: float, before: dict[str, float]) -> float:
    if name not in before:
        return value
    return max(value, before[name]) if name == "error" else min(value, before[name])
