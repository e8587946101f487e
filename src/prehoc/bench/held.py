"""The keys and values of a cell in memory: so many that no call finds them in a processor cache."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from prehoc.bench import memory
from prehoc.bench.inputs import LayerInputs
from prehoc.kernels.host import advise_large_pages

if TYPE_CHECKING:
    from prehoc.bench.attention import Cell, Setup

COLD = 32
"""Bytes of cache held, in sizes of the last processor cache: an eighth of them, what methods read, still is four."""


@dataclasses.dataclass
class Held:
    """Buffers of the cells' keys and values: some layers at once, each several times, so that no call finds them cached.

    Attributes
    ----------
    layers : int
        Layers held at once.
    copies : list of list of (Tensor, Tensor)
        Per held layer, its copies ``[B, Hkv, L, D]``.
    """

    layers: int
    copies: list[list[tuple[Tensor, Tensor]]]

    @classmethod
    def of(cls, cell: Cell, setup: Setup, layers: int) -> Held:
        """Allocate as many as the cold cache asks for, one at least, and more layers while half of the free memory allows."""
        one = cell.shape.kv_bytes(cell.batch, cell.length, setup.dtype)
        free = memory.free_bytes(setup.device)
        wanted = COLD * memory.last_cache_bytes(setup.device)
        most = wanted if free is None else max(free - memory.YARDSTICK[setup.device.type], 0) // 2
        count = max(1, math.ceil(min(wanted, most) / one))
        held = min(layers, max(count, most // one))
        size = (cell.batch, cell.shape.kv_heads, cell.length, cell.shape.dim)

        def buffer() -> Tensor:
            buffer = torch.empty(size, dtype=setup.dtype, device=setup.device)
            advise_large_pages(buffer)  # as the engine's caches are
            return buffer

        each = max(1, min(math.ceil(count / held), most // (one * held)))
        return cls(held, [[(buffer(), buffer()) for _ in range(each)] for _ in range(held)])

    def fill(self, slot: int, inputs: LayerInputs) -> None:
        """Write a layer into all its copies, for every batch row."""
        for k, v in self.copies[slot]:
            k.copy_(inputs.k.expand_as(k))
            v.copy_(inputs.v.expand_as(v))
