"""Scores of the middle on the device: every key against the queries that share it, a group of queries on one scale.

`_score` reads every key once, for all query heads that share it, and keeps float32 logits, one row a query head, with each
split's share of the LSE; `_relate` turns a group's logits into one row of integers that order like the scores. A group of one
needs no LSE: `_score` writes the integers at once.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from prehoc.kernels.triton import launch
from prehoc.kernels.triton.decode import DOT_ROWS, GATHER_STAGES, STAGES, WARPS, dots, locate, tile_keys
from prehoc.kernels.triton.topk import flat, number, ordered, rests

# Untuned: chosen by arithmetic, never timed on a GPU.
RELATE_KEYS, RELATE_WARPS = 512, 4


@triton.jit(do_not_specialize=["first", "start", "columns", "sink", "local"])
def _score(
    q,  # [B, H, D], contiguous
    k,  # [B, Hkv, n, D]
    heads,  # int64 [R] or None
    gate,  # bool [R] or None
    first,  # each int32 [B] or one number
    start,
    columns,
    table,  # int32 [B, blocks], when paged
    logits,  # float32 [R, G, width], when STATS
    sums,  # float32 [3, R, G, splits]: largest logit, sum of exponentials, and its part outside the middle, when STATS
    bits,  # int32 [R, width], unless STATS
    sink,
    local,
    width,
    scale,
    kv_heads,
    heads_per_kv,
    table_b,
    k_b,
    k_h,
    k_n,
    k_d,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,  # keys a block; 0: not paged
    UPCAST: tl.constexpr,
    G_PAD: tl.constexpr,
    D_PAD: tl.constexpr,
    N: tl.constexpr,
):
    """Score one split of one head's keys."""
    r = tl.program_id(0).to(tl.int64)
    if rests(gate, r):
        return
    split = tl.program_id(1)
    parts = tl.num_programs(1)
    pair = flat(heads, r)
    row = pair // (kv_heads * heads_per_kv)
    kv = (pair % (kv_heads * heads_per_kv)) // heads_per_kv
    first = number(first, row)
    start = number(start, row)
    columns = number(columns, row)
    lead = sink if STATS else 0  # the LSE needs sinks and local keys, the order of one head's scores does not
    last = columns if STATS else columns - local
    count = lead + tl.maximum(last - start, 0)
    chunk = tl.cdiv(tl.cdiv(count, parts), N) * N
    begin = split * chunk
    end = tl.minimum(begin + chunk, count)

    g = tl.arange(0, G_PAD)
    d = tl.arange(0, D_PAD)
    query = tl.load(
        q + (pair * GROUP + g)[:, None] * D + d[None, :], mask=(g[:, None] < GROUP) & (d[None, :] < D), other=0.0
    )
    if UPCAST:
        query = query.to(tl.float32)
    most = tl.full([G_PAD], float("-inf"), tl.float32)
    total = tl.zeros([G_PAD], tl.float32)
    beside = tl.zeros([G_PAD], tl.float32)
    base = k + kv * k_h
    line = (r * GROUP + g) * width
    for at in range(begin, end, N):
        j = at + tl.arange(0, N)
        column = tl.where(j < lead, first + j, start + j - lead)
        inside = (j < end) & (column < columns)  # a row shorter than its sinks has no middle
        middle = inside & (j >= lead) & (column < columns - local)
        outer, inner = locate(column, inside, row, table, table_b, BLOCK)
        keys = tl.load(
            base + (outer * k_b + inner * k_n)[:, None] + d[None, :] * k_d,
            mask=inside[:, None] & (d[None, :] < D),
            other=0.0,
        )
        if UPCAST:
            keys = keys.to(tl.float32)
        logit = dots(query, keys, GROUP) * scale  # [G, N]
        if STATS:
            tl.store(
                logits + line[:, None] + (column - start)[None, :], logit, mask=(g[:, None] < GROUP) & middle[None, :]
            )
            logit = tl.where(inside[None, :], logit, float("-inf"))
            higher = tl.maximum(most, tl.max(logit, 1))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.exp(most - safe)
            weights = tl.exp(logit - safe[:, None])
            total = total * shrink + tl.sum(weights, 1)
            beside = beside * shrink + tl.sum(tl.where(middle[None, :], 0.0, weights), 1)
            most = higher
        else:
            tl.store(bits + line[:, None] + (column - start)[None, :], ordered(logit), mask=middle[None, :])
    if STATS:
        plane = tl.num_programs(0).to(tl.int64) * GROUP * parts
        place = sums + (r * GROUP + g) * parts + split
        tl.store(place, most, mask=g < GROUP)
        tl.store(place + plane, total, mask=g < GROUP)
        tl.store(place + 2 * plane, beside, mask=g < GROUP)


@triton.jit
def _relate(
    logits,
    sums,
    bits,
    lse,  # float32 [R, G]
    outside,  # float32 [R, G]: the weight of sinks and local keys
    gate,  # bool [R] or None
    width,
    parts,
    GROUP: tl.constexpr,
    MEAN: tl.constexpr,
    G_PAD: tl.constexpr,
    S_PAD: tl.constexpr,
    N: tl.constexpr,
):
    """Merge a head's LSE and turn one tile of its group's logits into one row of ordered scores."""
    r = tl.program_id(0).to(tl.int64)
    if rests(gate, r):
        return
    g = tl.arange(0, G_PAD)
    s = tl.arange(0, S_PAD)
    plane = tl.num_programs(0).to(tl.int64) * GROUP * parts
    place = sums + ((r * GROUP + g) * parts)[:, None] + s[None, :]
    valid = (g[:, None] < GROUP) & (s[None, :] < parts)
    peaks = tl.load(place, mask=valid, other=float("-inf"))  # [G, S]
    most = tl.max(peaks, 1)
    most = tl.where(most == float("-inf"), 0.0, most)
    share = tl.exp(peaks - most[:, None])
    total = tl.sum(tl.load(place + plane, mask=valid, other=0.0) * share, 1)
    total = tl.where(total > 0, total, 1.0)  # rows of padding, and the tile's spare heads
    mass = most + tl.log(total)
    if tl.program_id(1) == 0:
        beside = tl.sum(tl.load(place + 2 * plane, mask=valid, other=0.0) * share, 1)
        tl.store(lse + r * GROUP + g, mass, mask=g < GROUP)
        tl.store(outside + r * GROUP + g, beside / total, mask=g < GROUP)
    j = tl.program_id(1) * N + tl.arange(0, N)
    logit = tl.load(
        logits + ((r * GROUP + g) * width)[:, None] + j[None, :],
        mask=(g[:, None] < GROUP) & (j[None, :] < width),  # behind a row's own middle: never used
        other=float("-inf"),
    )
    relative = logit - mass[:, None]
    score = tl.max(relative, 0)
    if MEAN:
        peak = tl.where(score == float("-inf"), 0.0, score)
        score = peak + tl.log(tl.sum(tl.exp(relative - peak[None, :]), 0))
    tl.store(bits + r * width + j, ordered(score), mask=j < width)


@dataclasses.dataclass
class Scores:
    """The scored middle of R heads.

    Parameters
    ----------
    bits : Tensor
        int32 ``[R, width]``, scores as `prehoc.kernels.triton.topk.ordered` returns them, by position in the middle.
    logits : Tensor or None
        float32 ``[R, G, width]``; this and the next two only where an LSE was asked for or needed.
    lse : Tensor or None
        float32 ``[R, G]``.
    base : Tensor or None
        float32 ``[R, G]``, the weight of sinks and local keys.
    """

    bits: Tensor
    logits: Tensor | None = None
    lse: Tensor | None = None
    base: Tensor | None = None


def score(
    q: Tensor,
    k: Tensor,
    heads: Tensor | None,
    gate: Tensor | None,
    first: Tensor | int,
    start: Tensor | int,
    selection_heads: int,
    sink: int,
    local: int,
    middle: int,
    scale: float,
    stats: bool,
    mean: bool,
    columns: Tensor | int,
    table: Tensor | None = None,
) -> Scores:
    """Score the middle of the chosen heads: at most `middle` columns, ``[start, columns - local)``; the rest as in `retrieve`.

    `first`, `start` and `columns` are int32 ``[B]`` or one number. With `gate`, bool ``[R]``, heads that it leaves out are not
    read, and their rows hold nothing of value. With `table` the keys are in blocks.
    """
    (b, h, d), hkv = q.shape, k.shape[1]
    group = h // selection_heads
    r = b * selection_heads if heads is None else heads.numel()
    width = -(-middle // 16) * 16  # rows that begin at a multiple of 16 are read by vectors
    waves = launch.WAVES if gate is None else launch.GATED_WAVES
    parts = launch.splits(sink + middle + local, r, q.device, waves)
    out, sums = Scores(torch.empty((r, width), dtype=torch.int32, device=q.device)), None
    if stats:
        out.logits = q.new_empty((r, group, width), dtype=torch.float32)
        sums = q.new_empty((3, r, group, parts), dtype=torch.float32)
        out.lse, out.base = q.new_empty((2, r, group), dtype=torch.float32)
    _score[(r, parts)](
        q,
        k,
        heads,
        gate,
        first,
        start,
        columns,
        table,
        out.logits,
        sums,
        out.bits,
        sink,
        local,
        width,
        scale,
        hkv,
        selection_heads // hkv,
        0 if table is None else table.stride(0),
        *k.stride(),
        GROUP=group,
        D=d,
        STATS=stats,
        BLOCK=0 if table is None else k.shape[2],
        UPCAST=launch.INTERPRETED,
        G_PAD=1 if group == 1 else launch.padded(group, DOT_ROWS),
        D_PAD=launch.padded(d, 16),
        N=tile_keys(d, k.element_size()),
        num_warps=WARPS,
        num_stages=STAGES if table is None else GATHER_STAGES,
    )
    if stats:
        _relate[(r, triton.cdiv(width, RELATE_KEYS))](
            out.logits,
            sums,
            out.bits,
            out.lse,
            out.base,
            gate,
            width,
            parts,
            GROUP=group,
            MEAN=mean,
            G_PAD=launch.padded(group),
            S_PAD=launch.padded(parts),
            N=RELATE_KEYS,
            num_warps=RELATE_WARPS,
        )
    return out
