"""The best of each row on the device: the k-th largest by radix, what lies above it, and the order of these few."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prehoc.kernels.triton import launch

# Untuned: chosen by arithmetic, never timed on a GPU.
SELECT_KEYS, SELECT_WARPS = 2048, 8
SORT_KEYS, SORT_WARPS = 2048, 8  # longer lists are sorted by torch


@triton.jit
def ordered(score):
    """Return int32 whose bits, read as unsigned numbers, order like the float32 scores; both zeros are alike."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648)


@triton.jit
def number(x, row):
    """Return the number of a row, from a line of them or the one that serves all rows."""
    if x.dtype.is_ptr():
        return tl.load(x + row).to(tl.int32)
    else:
        return x


@triton.jit
def rests(gate, r):
    """Return whether a gate lets head r rest."""
    if gate is None:
        return False
    else:
        return tl.load(gate + r).to(tl.int32) == 0


@triton.jit
def flat(heads, r):
    """Return the flat (row, head) pair of line r; without `heads`, all of them in order."""
    if heads is None:
        return r
    else:
        return tl.load(heads + r)


@triton.jit(do_not_specialize=["starts", "end", "topk"])
def _select(
    bits,  # int32 [R, width], by position in the middle
    starts,  # where each row's middle begins: int32 [B], or one number; `end` alike
    heads,  # int64 [R] or None
    gate,  # bool [R] or None
    chosen,  # int64 [R, topk]
    end,
    width,
    topk,
    per_row,
    N: tl.constexpr,
):
    """Collect one row's `topk` largest scores with their positions, of equal ones the first, in order of position."""
    r = tl.program_id(0).to(tl.int64)
    if rests(gate, r):
        return
    row = flat(heads, r) // per_row
    count = tl.maximum(number(end, row) - number(starts, row), 0)
    need = tl.minimum(count, topk)
    room = tl.cdiv(count, 16) * 16  # whole vectors; what lies behind the count is masked when it is used
    line = bits + r * width
    bins = tl.arange(0, 256)
    limit = tl.full([], 0, tl.uint32)  # the k-th largest score, found from its high bits down
    wanted = need  # how many of the scores that share these bits
    for shift in tl.static_range(24, -1, -8):
        histogram = tl.zeros([256], tl.int32)
        for at in range(0, count, N):
            j = at + tl.arange(0, N)
            score = tl.load(line + j, mask=j < room, other=0).to(tl.uint32, bitcast=True)
            alike = j < count
            if shift < 24:
                alike = alike & ((score >> (shift + 8)) == (limit >> (shift + 8)))
            histogram += tl.histogram(((score >> shift) & 255).to(tl.int32), 256, mask=alike)
        reached = tl.cumsum(histogram, 0, reverse=True)  # scores with this digit or a higher one
        above = reached - histogram
        found = (above < wanted) & (reached >= wanted)
        limit = limit | (tl.sum(tl.where(found, bins, 0), 0).to(tl.uint32) << shift)
        wanted -= tl.sum(tl.where(found, above, 0), 0)
    taken = tl.full([], 0, tl.int32)
    equals = tl.full([], 0, tl.int32)
    for at in range(0, count, N):
        j = at + tl.arange(0, N)
        score = tl.load(line + j, mask=j < room, other=0).to(tl.uint32, bitcast=True)
        equal = ((score == limit) & (j < count)).to(tl.int32)
        take = (score > limit) & (j < count)
        take = (take | ((equal == 1) & (equals + tl.cumsum(equal, 0) <= wanted))).to(tl.int32)
        slot = taken + tl.cumsum(take, 0) - 1
        # one number that sorts by score, then by lower position
        packed = (score.to(tl.int64) << 31) | (2147483647 - j).to(tl.int64)
        tl.store(chosen + r * topk + slot, packed, mask=(take == 1) & (slot < need))
        taken += tl.sum(take, 0)
        equals += tl.sum(equal, 0)


@triton.jit(do_not_specialize=["starts", "end", "topk"])
def _order(
    chosen, starts, heads, gate, order, end, topk, per_row,
    K_PAD: tl.constexpr,
):  # fmt: skip
    """Sort what was collected, best first, and write its columns, -1 behind them."""
    r = tl.program_id(0).to(tl.int64)
    if rests(gate, r):
        return
    row = flat(heads, r) // per_row
    start = number(starts, row)
    need = tl.minimum(tl.maximum(number(end, row) - start, 0), topk)
    j = tl.arange(0, K_PAD)
    packed = tl.load(chosen + r * topk + j, mask=j < need, other=-1)
    packed = tl.sort(packed, descending=True)
    column = start + (2147483647 - (packed & 2147483647))
    tl.store(order + r * topk + j, tl.where(j < need, column, -1), mask=j < topk)


def best(
    bits: Tensor,
    starts: Tensor | int,
    heads: Tensor | None,
    gate: Tensor | None,
    per_row: int,
    end: Tensor | int,
    topk: int,
) -> Tensor:
    """Return int64 ``[R, topk]`` columns, best first, equal scores by lower column, -1 where the middle is smaller.

    Parameters
    ----------
    bits : Tensor
        int32 ``[R, width]``, scores as `ordered` returns them, by position in the middle; the width a multiple of 16.
    starts, end : Tensor or int
        Where the middle begins and ends, int32 ``[B]`` or one number.
    heads : Tensor or None
        int64 ``[R]`` flat (row, head) pairs; None: all.
    gate : Tensor or None
        bool ``[R]``, heads to rank; the lines of the others hold nothing of value.
    per_row : int
        Heads of a row.
    topk : int
        Columns a head, at least 1.
    """
    r, width = bits.shape
    order = torch.empty((r, topk), dtype=torch.int64, device=bits.device)
    sorts = topk <= SORT_KEYS
    chosen = torch.empty_like(order) if sorts else torch.full_like(order, -1)
    sizes = {"N": SELECT_KEYS, "num_warps": SELECT_WARPS}
    _select[(r,)](bits, starts, heads, gate, chosen, end, width, topk, per_row, **sizes)
    if sorts:
        sizes = {"K_PAD": launch.padded(topk), "num_warps": SORT_WARPS}
        _order[(r,)](chosen, starts, heads, gate, order, end, topk, per_row, **sizes)
        return order
    packed = torch.sort(chosen, dim=1, descending=True).values
    column = begin(starts, heads, r, per_row) + (2147483647 - (packed & 2147483647))
    return torch.where(packed >= 0, column, -1)


def begin(starts: Tensor | int, heads: Tensor | None, r: int, per_row: int) -> Tensor | int:
    """Return the first column of each head's middle, int32 ``[R, 1]`` or one number."""
    if isinstance(starts, int):
        return starts
    pairs = torch.arange(r, device=starts.device) if heads is None else heads
    return starts[pairs // per_row][:, None]
