"""Exact retrieval on the device: score the middle, put a group on one scale, take the best.

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

from prehoc.kernels.host import group_queries
from prehoc.kernels.reference import Retrieval
from prehoc.kernels.triton import launch
from prehoc.kernels.triton.decode import DOT_ROWS, STAGES, WARPS, dots, tile_keys
from prehoc.kernels.triton.topk import begin, best, flat, ordered, rests

# Untuned: chosen by arithmetic, never timed on a GPU.
RELATE_KEYS, RELATE_WARPS = 512, 4


@triton.jit(do_not_specialize=["columns", "sink", "local"])
def _score(
    q,  # [B, H, D], contiguous
    k,  # [B, Hkv, n, D]
    heads,  # int64 [R] or None
    gate,  # bool [R] or None
    rows,  # int32 [2, B]: first and start
    logits,  # float32 [R, G, width], when STATS
    sums,  # float32 [3, R, G, splits]: largest logit, sum of exponentials, and its part outside the middle, when STATS
    bits,  # int32 [R, width], unless STATS
    columns,
    sink,
    local,
    width,
    scale,
    batch,
    kv_heads,
    heads_per_kv,
    k_b,
    k_h,
    k_n,
    k_d,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    STATS: tl.constexpr,
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
    first = tl.load(rows + row)
    start = tl.load(rows + batch + row)
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
    base = k + row * k_b + kv * k_h
    line = (r * GROUP + g) * width
    for at in range(begin, end, N):
        j = at + tl.arange(0, N)
        column = tl.where(j < lead, first + j, start + j - lead)
        inside = (j < end) & (column < columns)  # a row shorter than its sinks has no middle
        middle = inside & (j >= lead) & (column < columns - local)
        keys = tl.load(
            base + column.to(tl.int64)[:, None] * k_n + d[None, :] * k_d,
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
    rows: Tensor,
    selection_heads: int,
    sink: int,
    local: int,
    least: int,
    scale: float,
    stats: bool,
    mean: bool,
) -> Scores:
    """Score the middle of the chosen heads; `rows` holds first and start, `least` is the least start, the rest as in `retrieve`.

    With `gate`, bool ``[R]``, heads that it leaves out are not read, and their rows hold nothing of value.
    """
    (b, h, d), (_, hkv, n, _) = q.shape, k.shape
    group = h // selection_heads
    r = b * selection_heads if heads is None else heads.numel()
    width = -(-(n - local - least) // 16) * 16  # rows that begin at a multiple of 16 are read by vectors
    parts = launch.splits(n - least + sink, r, q.device, launch.WAVES if gate is None else launch.GATED_WAVES)
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
        rows,
        out.logits,
        sums,
        out.bits,
        n,
        sink,
        local,
        width,
        scale,
        rows.shape[1],
        hkv,
        selection_heads // hkv,
        *k.stride(),
        GROUP=group,
        D=d,
        STATS=stats,
        UPCAST=launch.INTERPRETED,
        G_PAD=1 if group == 1 else launch.padded(group, DOT_ROWS),
        D_PAD=launch.padded(d, 16),
        N=tile_keys(d, k.element_size()),
        num_warps=WARPS,
        num_stages=STAGES,
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


def retrieve(
    q: Tensor,
    k: Tensor,
    heads: Tensor | None,
    selection_heads: int,
    first: tuple[int, ...],
    start: tuple[int, ...],
    sink: int,
    local: int,
    topk: int,
    scale: float,
    with_mass: bool = False,
    reduce: str = "max",
) -> Retrieval:
    """Score the middle of each chosen head exactly and return its best keys; as in the reference backend."""
    launch.check(q, k)
    q, group = q.contiguous(), group_queries(q, selection_heads, k.shape[1]).shape[2]
    r = q.shape[0] * selection_heads if heads is None else heads.numel()
    end = k.shape[2] - local
    topk = min(topk, max(end - min(start), 0))
    if r == 0 or topk == 0:
        order = torch.empty((r, topk), dtype=torch.int64, device=q.device)
        none, every = (
            order.new_empty((r, group, 0), dtype=torch.float32),
            order.new_ones((r, group), dtype=torch.float32),
        )
        return Retrieval(order, none, every) if with_mass else Retrieval(order)
    chosen = None if heads is None else heads.contiguous()
    rows = launch.per_row(q.device, first, start)
    with torch.cuda.device_of(q):
        found = score(
            q,
            k,
            chosen,
            None,
            rows,
            selection_heads,
            sink,
            local,
            min(start),
            scale,
            stats=group > 1 or with_mass,
            mean=reduce == "mean",
        )
        order = best(found.bits, rows[1], chosen, None, selection_heads, end, topk)
    if not with_mass:
        return Retrieval(order)
    assert found.logits is not None and found.lse is not None
    position = (order - begin(rows[1], chosen, r, selection_heads)).clamp(min=0)[:, None].expand(-1, group, -1)
    weights = torch.exp(found.logits.gather(2, position) - found.lse[..., None])  # [R, G, k]
    return Retrieval(order, torch.where((order >= 0)[:, None], weights, 0.0), found.base)
