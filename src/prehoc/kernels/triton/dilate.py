"""Dilation on the device: one program a head marks its columns, lowers k until they fit, and packs them in order."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prehoc.kernels.triton.topk import number, rests

# Untuned: chosen by arithmetic, never timed on a GPU.
KEYS, WARPS = 1024, 8


@triton.jit(do_not_specialize=["first", "start", "best", "critical", "limit", "k", "columns", "sink", "local", "width"])
def _dilate(
    order,  # int64 [R, k]
    gate,  # bool [R] or None
    first,  # each up to `limit` a line of numbers, one for `per_row` heads, or one number
    start,
    best,
    critical,
    limit,
    entry,  # int32 [R, pitch], room for: the number of critical keys from which on a column belongs
    arrivals,  # int32 [R, k + 1], room for: columns that each number brings in, when LIMITED
    lists,  # int32 [R, width]
    lengths,  # int32 [R]
    k,
    columns,
    sink,
    local,
    radius,
    width,
    pitch,
    per_row,
    PER_BEST: tl.constexpr,
    LIMITED: tl.constexpr,
    N: tl.constexpr,
):
    """Build one head's list. What is read back after a barrier comes from the L2 cache, where atomics leave it."""
    r = tl.program_id(0).to(tl.int64)
    if rests(gate, r):
        return
    row = r // per_row
    lead = number(first, row)
    begin = number(start, row)
    many = number(best, row)
    allowed = number(critical, row)
    end = columns - local
    entry += r * pitch
    tile = tl.arange(0, N)
    for at in range(0, pitch, N):
        tl.store(entry + at + tile, 2147483647, mask=at + tile < pitch)  # later than any number of critical keys
    if LIMITED:
        arrivals += r * (k + 1)
        for at in range(0, k + 1, N):
            tl.store(arrivals + at + tile, 0, mask=at + tile <= k)
    tl.debug_barrier()
    for at in range(0, k, N):
        rank = at + tile + 1
        column = tl.load(order + r * k + at + tile, mask=rank <= k, other=-1).to(tl.int32)
        real = column >= 0
        tl.atomic_min(entry + column, rank, mask=real, sem="relaxed")
        source = real & (rank <= many)
        for offset in range(1, radius + 1):
            tl.atomic_min(
                entry + column - offset, rank * PER_BEST, mask=source & (column - offset >= begin), sem="relaxed"
            )
            tl.atomic_min(
                entry + column + offset, rank * PER_BEST, mask=source & (column + offset < end), sem="relaxed"
            )
    tl.debug_barrier()
    if LIMITED:
        seen = tl.full([], 0, tl.int32)
        for at in range(0, columns, N):
            j = at + tile
            always = ((j >= lead) & (j < lead + sink)) | (j >= end)
            arrival = tl.load(entry + j, mask=j < pitch, other=2147483647, cache_modifier=".cg")
            tl.atomic_add(arrivals + arrival, 1, mask=(j < columns) & (arrival <= k), sem="relaxed")
            seen += tl.sum((always & (j < columns)).to(tl.int32), 0)
        tl.debug_barrier()
        most = number(limit, row)
        fits = tl.full([], 0, tl.int32)
        for at in range(1, k + 1, N):
            some = tl.load(arrivals + at + tile, mask=at + tile <= k, other=0, cache_modifier=".cg")
            fits += tl.sum(((seen + tl.cumsum(some, 0) <= most) & (at + tile <= k)).to(tl.int32), 0)
            seen += tl.sum(some, 0)
        allowed = tl.minimum(allowed, fits)
    taken = tl.full([], 0, tl.int32)
    lists += r * width
    for at in range(0, columns, N):
        j = at + tile
        always = ((j >= lead) & (j < lead + sink)) | (j >= end)
        arrival = tl.load(entry + j, mask=j < pitch, other=2147483647, cache_modifier=".cg")
        keep = ((j < columns) & (always | (arrival <= allowed))).to(tl.int32)
        slot = taken + tl.cumsum(keep, 0) - 1
        tl.store(lists + slot, j, mask=keep == 1)
        taken += tl.sum(keep, 0)
    for at in range(taken, width, N):
        tl.store(lists + at + tile, -1, mask=at + tile < width)
    tl.store(lengths + r, taken)


def build(
    order: Tensor,
    gate: Tensor | None,
    numbers: tuple[Tensor | int, ...],
    per_row: int,
    columns: int,
    sink: int,
    local: int,
    radius: int,
    per_best: int,
    limited: bool,
    lists: Tensor,
    lengths: Tensor,
) -> None:
    """Write the lists int32 ``[R, width]`` and lengths int32 ``[R]`` of the heads that `gate`, bool ``[R]``, lets through.

    `numbers` are first, start, best, critical and limit, each a line of one number for `per_row` heads or one number.
    """
    (r, k), device = order.shape, order.device
    pitch = -(-columns // 16) * 16  # rows that begin at a multiple of 16 are read by vectors
    _dilate[(r,)](
        order.contiguous(),
        gate,
        *(x.contiguous() if isinstance(x, Tensor) else x for x in numbers),
        torch.empty((r, pitch), dtype=torch.int32, device=device),
        torch.empty((r, k + 1), dtype=torch.int32, device=device) if limited else None,
        lists,
        lengths,
        k,
        columns,
        sink,
        local,
        radius,
        lists.shape[1],
        pitch,
        per_row,
        PER_BEST=per_best,
        LIMITED=limited,
        N=KEYS,
        num_warps=WARPS,
    )


def dilate(
    order: Tensor,
    first: Tensor | int,
    start: Tensor | int,
    columns: int,
    sink: int,
    local: int,
    radius: int,
    best: Tensor | int,
    critical: Tensor | int,
    limit: Tensor | int | None = None,
    per_best: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the dilated lists, -1 behind each; as in the reference backend, without trimming them to the longest."""
    r, k = order.shape
    width = min(columns, sink + local + k + 2 * radius * (min(best, k) if isinstance(best, int) else k))
    lists = torch.empty((r, width), dtype=torch.int32, device=order.device)
    lengths = lists.new_empty(r)
    limited = limit is not None
    numbers = (first, start, best, critical, 0 if limit is None else limit)
    with torch.cuda.device_of(order):
        more = (per_best or 1) if limited else 1
        build(order, None, numbers, 1, columns, sink, local, radius, more, limited, lists, lengths)
    return lists, lengths
