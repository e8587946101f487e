"""The rows of the attention benchmark: torch's dense attention, FlexAttention, and every method through the engine's own path."""

from __future__ import annotations

import time
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from prehoc import kernels
from prehoc.books import Books
from prehoc.kernels.flex import BLOCK, Pattern, decode_flex, whole
from prehoc.kernels.host import wait
from prehoc.selection import Decision, Method, Selection, State, Step, Window, attend, decide

SDPA = {
    "cpu": ("flash", "math"),
    "cuda": ("flash", "efficient", "cudnn", "math"),
}
_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def now(device: torch.device) -> float:
    """Return the clock once the device has done what it was given."""
    wait(device)
    return time.perf_counter()


class Row(Protocol):
    """A way to attend at one decode step of one layer.

    Attributes
    ----------
    name : str
        As the table names it.
    fixed : bool
        Whether every step of a layer is the same work, so that a sample of the steps is enough.
    extra_bytes : int
        Memory that the row allocates while it runs, beside the cache.
    """

    name: str
    fixed: bool
    extra_bytes: int

    def begin(self) -> None:
        """Forget every layer's state: a new round starts at the first step."""
        ...

    def skip(self, step: Step) -> None:
        """Follow a step that is not timed."""
        ...

    def run(self, step: Step) -> tuple[Tensor, Decision, dict[str, float]]:
        """Return the output ``[B, H, D]``, what was read, and the seconds of each part."""
        ...

    def selected(self, step: Step, decision: Decision) -> Selection | Window | None:
        """Return which of the step's keys the output is of: asked for once after every `run`, when rows are checked."""
        ...

    def book(self, books: Books, step: Step, decision: Decision) -> None:
        """Enter the step that `run` has just run."""
        ...


class MethodRow:
    """A method: `prehoc.selection.decide` and `attend`, as the engine calls them.

    Parameters
    ----------
    name : str
        As the user wrote it.
    method : Method
        The method.
    backend : str
        Kernel backend.
    device : device
        Where it runs.
    """

    extra_bytes = 0

    def __init__(self, name: str, method: Method, backend: str, device: torch.device) -> None:
        self.name, self.method, self.plan = name, method, method.plan()
        self.fixed = self.plan.dense
        self._ops = kernels.get(backend, device)
        self._states: dict[int, State] = {}

    def begin(self) -> None:
        """Forget the selection state of every layer."""
        self._states = {}

    def states(self, layers: list[int]) -> dict[int, State]:
        """Return the selection state of each of some layers."""
        return {layer: self._states.setdefault(layer, State()) for layer in layers}

    def decide(self, step: Step) -> Decision:
        """Return what the step reads."""
        return decide(self.plan, step, self.states([step.layer])[step.layer] if self.plan.selector else None)

    def skip(self, step: Step) -> None:
        """Advance the selection state."""
        self.decide(step)

    def run(self, step: Step) -> tuple[Tensor, Decision, dict[str, float]]:
        """Select and attend."""
        device = step.q.device
        begin = now(device)
        decision = self.decide(step)
        between = now(device)
        out = attend(self._ops, step, decision.selection)
        end = now(device)
        return out, decision, {"selection": between - begin, "attention": end - between}

    def selected(self, step: Step, decision: Decision) -> Selection | Window | None:
        """Return the decision's selection."""
        return decision.selection

    def book(self, books: Books, step: Step, decision: Decision) -> None:
        """Enter the decision."""
        books.decision(step, step.v.shape[3], decision)


class SdpaRow:
    """Torch's scaled dot product attention over all keys with one of its kernels, the query heads of a group as its queries.

    Grouping reads every key once, which repeated heads would not: this is SDPA at its best.

    Parameters
    ----------
    kernel : str
        A name in `SDPA`.
    kv_bytes : int
        Bytes of one layer's keys and values.
    dtype : dtype
        Their dtype.
    """

    fixed = True

    def __init__(self, kernel: str, kv_bytes: int, dtype: torch.dtype) -> None:
        self.name = f"sdpa-{kernel}"
        self._kernel = _KERNELS[kernel]
        # the math kernel copies what it multiplies, in float32
        self.extra_bytes = kv_bytes * 4 // dtype.itemsize if kernel == "math" else 0

    def begin(self) -> None:
        """Nothing is kept."""

    def skip(self, step: Step) -> None:
        """Nothing follows."""

    def run(self, step: Step) -> tuple[Tensor, Decision, dict[str, float]]:
        """Attend to every key."""
        b, h, d = step.q.shape
        grouped = step.q.view(b, step.k.shape[1], -1, d)  # [B, Hkv, G, D]
        with sdpa_kernel([self._kernel]):
            begin = now(step.q.device)
            out = F.scaled_dot_product_attention(grouped, step.k, step.v, scale=step.scale)
            end = now(step.q.device)
        return out.reshape(b, h, -1), Decision(None), {"attention": end - begin}

    def selected(self, step: Step, decision: Decision) -> Selection | Window | None:
        """Return the decision's selection."""
        return decision.selection

    def book(self, books: Books, step: Step, decision: Decision) -> None:
        """Enter a read of every key."""
        books.decision(step, step.v.shape[3], decision)


class _PatternRow:
    """What rows share that act on another row's selection: that row decides beside them, untimed."""

    fixed = True
    extra_bytes = 0

    def __init__(self, kind: str, pattern: MethodRow, columns: int) -> None:
        self.name = f"{kind} ({pattern.name})"
        self.pattern = pattern
        self._columns = columns

    def begin(self) -> None:
        """Forget the pattern's state."""
        self.pattern.begin()

    def skip(self, step: Step) -> None:
        """Advance the pattern's state."""
        self.pattern.skip(step)

    def selected(self, step: Step, decision: Decision) -> Selection | Window | None:
        """Return the decision's selection."""
        return decision.selection


class FlexRow(_PatternRow):
    """FlexAttention with the BlockMask of what another row selects; building the mask is timed apart.

    Parameters
    ----------
    pattern : MethodRow
        A row of its own for the selection, which is not timed.
    columns : int
        Columns of the buffers.
    """

    def __init__(self, pattern: MethodRow, columns: int) -> None:
        super().__init__("flex", pattern, columns)
        self._mask: Pattern | None = None

    def run(self, step: Step) -> tuple[Tensor, Decision, dict[str, float]]:
        """Build the mask of the pattern and attend with it."""
        decision = self.pattern.decide(step)
        b, h, _ = step.q.shape
        device = step.q.device
        if self._mask is None:
            torch._dynamo.reset()  # a cell has its own shapes: one graph each
            self._mask = Pattern(b, h, self._columns, device)
        buffers = [whole(x, self._columns) for x in (step.k, step.v)]
        begin = now(device)
        mask = self._mask.build(step, decision.selection)
        between = now(device)
        out = decode_flex(step.q, buffers[0], buffers[1], mask, step.scale)
        end = now(device)
        return out, decision, {"mask": between - begin, "attention": end - between}

    def book(self, books: Books, step: Step, decision: Decision) -> None:
        """Enter the blocks that were read: one read of a block serves its group at best."""
        assert self._mask is not None
        heads, (b, hkv, n, d) = step.q.shape[1], step.k.shape
        keys, pair = self._mask.blocks() * BLOCK, (d + step.v.shape[3]) * step.k.element_size()
        traffic = books.traffic
        traffic.triples += b * heads
        traffic.keys_read += keys
        traffic.keys_visible += n * b * heads
        traffic.bytes_processed += keys * hkv // heads * pair
        traffic.bytes_dense += b * hkv * n * pair


class ReadRow(_PatternRow):
    """A yardstick, no attention: the keys and values that another row attends to are read and nothing is computed with them.

    Its time, measured between the others, is the least that this memory allows for that row now, whatever a kernel does.

    Parameters
    ----------
    pattern : MethodRow
        A row of its own for the selection, which is not timed.
    columns : int
        Columns of the buffers, all of which are read where the pattern reads every key.
    """

    def __init__(self, pattern: MethodRow, columns: int) -> None:
        super().__init__("read", pattern, columns)

    def run(self, step: Step) -> tuple[Tensor, Decision, dict[str, float]]:
        """Read; the output is empty."""
        selection, ops, device = self.pattern.decide(step).selection, kernels.get("cpu", step.q.device), step.q.device
        if isinstance(selection, Selection):
            begin = now(device)
            ops.gather(step.k, step.v, selection.indices, selection.lengths)
            seconds = now(device) - begin
            return step.q[:0], Decision(selection, heads=selection.indices.shape[1]), {"attention": seconds}
        buffers = [whole(x, self._columns).view(torch.float32) for x in (step.k, step.v)]
        begin = now(device)
        for buffer in buffers:
            ops.stream(buffer, 1)
        return step.q[:0], Decision(None), {"attention": now(device) - begin}

    def book(self, books: Books, step: Step, decision: Decision) -> None:
        """Enter the reads."""
        books.decision(step, step.v.shape[3], decision)
