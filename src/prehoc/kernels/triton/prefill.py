"""Attention of many queries at once under a window: a tile of queries visits the sinks and the keys its own window can reach."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from prehoc.kernels.prefill import causal_pairs
from prehoc.kernels.triton import launch


@dataclasses.dataclass(frozen=True)
class Tile:
    """Sizes of one program: queries it answers, keys it reads at once, warps and pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


# Untuned: chosen by arithmetic, never timed on a GPU. By bytes of an element and padded head size.
TILES = {
    (2, 64): Tile(128, 64, 8, 3),
    (2, 128): Tile(128, 64, 8, 3),
    (2, 256): Tile(64, 32, 8, 2),
    (4, 64): Tile(64, 32, 8, 2),
    (4, 128): Tile(32, 32, 4, 2),
    (4, 256): Tile(32, 16, 8, 2),
}


@triton.jit(do_not_specialize=["tokens", "columns", "sink"])
def _prefill(
    q,  # [B, H, T, D]
    k,  # [B, Hkv, n, D]
    v,  # [B, Hkv, n, Dv]
    out,  # [B, H, T, Dv], contiguous
    rows,  # int32 [1, B]: first
    hidden,  # int32 [n + 1]: keys hidden from a query that sees t, when WINDOWED
    tokens,
    columns,
    sink,
    scale,
    heads,
    group,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
    WINDOWED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, UPCAST: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Answer one tile of one head's queries; the longest tiles start first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    pair = tl.program_id(1)
    row = pair // heads
    head = pair % heads
    first = tl.load(rows + row)
    i = tile * M + tl.arange(0, M)
    d, dv = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    base = q + row.to(tl.int64) * q_b + head.to(tl.int64) * q_h
    query = tl.load(
        base + i.to(tl.int64)[:, None] * q_n + d[None, :] * q_d,
        mask=(i[:, None] < tokens) & (d[None, :] < D),
        other=0.0,
    )
    if UPCAST:
        query = query.to(tl.float32)
    last = columns - tokens + i  # a query's own column
    real = (last >= first) & (i < tokens)
    begin = first
    low = tl.where(real, first, columns)  # padding sees nothing
    sink_end = first
    if WINDOWED:
        low = tl.where(real, first + tl.load(hidden + last - first + 1, mask=real, other=0), columns)
        sink_end = first + sink
        begin = tl.min(low, 0)  # the window of the first real query reaches furthest back
        begin = tl.where(begin <= sink_end, first, begin)
    end = tl.minimum(columns - tokens + (tile + 1) * M, columns)
    apart = first  # where the sinks end that the window does not reach
    if WINDOWED:
        apart = tl.where(begin > first, tl.minimum(sink_end, end), first)
    most = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mean = tl.zeros([M, DV_PAD], tl.float32)
    keys_at = k + row.to(tl.int64) * k_b + (head // group).to(tl.int64) * k_h
    values_at = v + row.to(tl.int64) * v_b + (head // group).to(tl.int64) * v_h
    lead = tl.cdiv(apart - first, N)  # tiles of sinks
    for t in range(0, lead + tl.cdiv(tl.maximum(end - begin, 0), N)):
        column = tl.where(t < lead, first + t * N, begin + (t - lead) * N) + tl.arange(0, N)
        inside = column < tl.where(t < lead, apart, end)
        place = column.to(tl.int64)[:, None]
        keys = tl.load(keys_at + place * k_n + d[None, :] * k_d, mask=inside[:, None] & (d[None, :] < D), other=0.0)
        values = tl.load(
            values_at + place * v_n + dv[None, :] * v_d, mask=inside[:, None] & (dv[None, :] < DV), other=0.0
        )
        if UPCAST:
            keys = keys.to(tl.float32)
            values = values.to(tl.float32)
        logits = tl.dot(query, tl.trans(keys), input_precision="ieee") * (scale * 1.4426950408889634)  # [M, N], base 2
        seen = inside[None, :] & (column[None, :] <= last[:, None])
        seen = seen & ((column[None, :] >= low[:, None]) | (column[None, :] < sink_end))
        logits = tl.where(seen, logits, float("-inf"))
        higher = tl.maximum(most, tl.max(logits, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # a query that sees nothing yet
        shrink = tl.exp2(most - safe)
        weights = tl.exp2(logits - safe[:, None])
        total = total * shrink + tl.sum(weights, 1)
        mean = mean * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        most = higher
    mean = tl.where(real[:, None], mean / tl.where(total > 0, total, 1.0)[:, None], 0.0)
    place = (pair.to(tl.int64) * tokens + i)[:, None] * DV + dv[None, :]
    tl.store(out + place, mean.to(out.dtype.element_ty), mask=(i[:, None] < tokens) & (dv[None, :] < DV))


def prefill_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: tuple[int, ...],
    scale: float,
    hidden: Callable[[int], int] | None = None,
    sink: int = 0,
) -> tuple[Tensor, int]:
    """Attend causally, each query to the sinks and to its visible window; as in `prehoc.kernels.prefill`.

    The pairs are counted as there, by tiles of this kernel's queries.
    """
    launch.check(q, k, v)
    (b, h, tokens, d), (_, hkv, n, _), dv = q.shape, k.shape, v.shape[3]
    tile = TILES[q.element_size(), max(launch.padded(max(d, dv)), 64)]
    out = q.new_empty((b, h, tokens, dv))
    table = None
    if hidden is not None:
        table = torch.tensor(
            [0, *(hidden(t) for t in range(1, n - min(first) + 1))], dtype=torch.int32, device=q.device
        )
    with torch.cuda.device_of(q):
        _prefill[(triton.cdiv(tokens, tile.queries), b * h)](
            q,
            k,
            v,
            out,
            launch.per_row(q.device, first),
            table,
            tokens,
            n,
            sink,
            scale,
            h,
            h // hkv,
            *q.stride(),
            *k.stride(),
            *v.stride(),
            WINDOWED=hidden is not None,
            D=d,
            DV=dv,
            UPCAST=launch.INTERPRETED,
            D_PAD=launch.padded(d, 16),
            DV_PAD=launch.padded(dv, 16),
            M=tile.queries,
            N=tile.keys,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out, sum(_pairs(n - tokens - begin, n - begin, tile.queries, hidden, sink) for begin in first)


def _pairs(begin: int, end: int, size: int, hidden: Callable[[int], int] | None, sink: int) -> int:
    """Return the pairs that the tiles of the queries of tokens `begin` to `end` - 1 (below 0: padding) work on."""
    if hidden is None:
        return causal_pairs(begin, end)
    total = 0
    for a in range(begin, end, size):
        some, stop = max(a, 0), min(a + size, end)
        if stop > some:
            low = hidden(some + 1)
            keys = stop - low + sink if low > sink else stop
            total += (stop - some) * keys - causal_pairs(0, stop - some - 1)
    return total
