"""Exact retrieval on the device: score the middle, put a group on one scale, select by radix, order.

Four kernels. `_score` reads every key once, for all query heads that share it, and keeps float32 logits, one row a query head,
with each split's share of the LSE. `_relate` turns a group's logits into one row of integers that order like the scores.
`_select` finds the k-th largest of a row, eight bits a pass, and collects what lies above it. `_order` sorts these few.
A group of one needs no LSE: `_score` writes the integers at once.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prehoc.kernels.host import group_queries
from prehoc.kernels.reference import Retrieval
from prehoc.kernels.triton import launch
from prehoc.kernels.triton.decode import DOT_ROWS, STAGES, WARPS, dots, tile_keys

# Untuned: chosen by arithmetic, never timed on a GPU.
RELATE_KEYS, RELATE_WARPS = 512, 4
SELECT_KEYS, SELECT_WARPS = 2048, 8
SORT_KEYS, SORT_WARPS = 2048, 8  # longer lists are sorted by torch


@triton.jit
def _ordered(score):
    """Return int32 whose bits, read as unsigned numbers, order like the float32 scores; both zeros are alike."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648)


@triton.jit(do_not_specialize=["columns", "sink", "local"])
def _score(
    q,  # [B, H, D], contiguous
    k,  # [B, Hkv, n, D]
    heads,  # int64 [R] or None
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
    HEADS: tl.constexpr,
    STATS: tl.constexpr,
    UPCAST: tl.constexpr,
    G_PAD: tl.constexpr,
    D_PAD: tl.constexpr,
    N: tl.constexpr,
):
    """Score one split of one head's keys."""
    r = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    parts = tl.num_programs(1)
    pair = tl.load(heads + r) if HEADS else r
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
            tl.store(bits + line[:, None] + (column - start)[None, :], _ordered(logit), mask=middle[None, :])
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
    tl.store(bits + r * width + j, _ordered(score), mask=j < width)


@triton.jit(do_not_specialize=["columns", "local", "topk"])
def _select(
    bits, heads, rows, chosen, columns, local, width, topk, batch, per_row, HEADS: tl.constexpr, N: tl.constexpr
):
    """Collect one row's `topk` largest scores with their positions, of equal ones the first, in order of position."""
    r = tl.program_id(0).to(tl.int64)
    pair = tl.load(heads + r) if HEADS else r
    count = tl.maximum(columns - local - tl.load(rows + batch + pair // per_row), 0)
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


@triton.jit(do_not_specialize=["columns", "local", "topk"])
def _order(chosen, heads, rows, order, columns, local, topk, batch, per_row, HEADS: tl.constexpr, K_PAD: tl.constexpr):
    """Sort what was collected, best first, and write its columns, -1 behind them."""
    r = tl.program_id(0).to(tl.int64)
    pair = tl.load(heads + r) if HEADS else r
    start = tl.load(rows + batch + pair // per_row)
    need = tl.minimum(tl.maximum(columns - local - start, 0), topk)
    j = tl.arange(0, K_PAD)
    packed = tl.load(chosen + r * topk + j, mask=j < need, other=-1)
    packed = tl.sort(packed, descending=True)
    column = start + (2147483647 - (packed & 2147483647))
    tl.store(order + r * topk + j, tl.where(j < need, column, -1), mask=j < topk)


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
    group = group_queries(q.contiguous(), selection_heads, k.shape[1]).shape[2]
    (b, _, d), (_, hkv, n, _), device = q.shape, k.shape, q.device
    r = b * selection_heads if heads is None else heads.numel()
    width = max(n - local - min(start), 0)
    topk = min(topk, width)
    order = torch.empty((r, topk), dtype=torch.int64, device=device)
    if r == 0 or topk == 0:
        return _empty(order, group, q) if with_mass else Retrieval(order)
    width = -(-width // 16) * 16  # rows that begin at a multiple of 16 are read by vectors
    stats = group > 1 or with_mass
    rows = launch.per_row(first, start, device)
    chosen = None if heads is None else heads.contiguous()
    parts = launch.splits(n - min(start) + sink, r, device)
    numbers = torch.empty((r, width), dtype=torch.int32, device=device)
    logits = sums = lse = base = None
    if stats:
        logits = torch.empty((r, group, width), dtype=torch.float32, device=device)
        sums = torch.empty((3, r, group, parts), dtype=torch.float32, device=device)
        lse, base = torch.empty((2, r, group), dtype=torch.float32, device=device)
    given = {"HEADS": heads is not None}
    with torch.cuda.device_of(q):
        _score[(r, parts)](
            q.contiguous(),
            k,
            chosen,
            rows,
            logits,
            sums,
            numbers,
            n,
            sink,
            local,
            width,
            scale,
            b,
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
            **given,
        )
        if stats:
            _relate[(r, triton.cdiv(width, RELATE_KEYS))](
                logits,
                sums,
                numbers,
                lse,
                base,
                width,
                parts,
                GROUP=group,
                MEAN=reduce == "mean",
                G_PAD=launch.padded(group),
                S_PAD=launch.padded(parts),
                N=RELATE_KEYS,
                num_warps=RELATE_WARPS,
            )
        sorts = topk <= SORT_KEYS
        best = torch.empty((r, topk), dtype=torch.int64, device=device) if sorts else order.new_full((r, topk), -1)
        _select[(r,)](
            numbers,
            chosen,
            rows,
            best,
            n,
            local,
            width,
            topk,
            b,
            selection_heads,
            N=SELECT_KEYS,
            num_warps=SELECT_WARPS,
            **given,
        )
        if sorts:
            _order[(r,)](
                best,
                chosen,
                rows,
                order,
                n,
                local,
                topk,
                b,
                selection_heads,
                K_PAD=launch.padded(topk),
                num_warps=SORT_WARPS,
                **given,
            )
        else:
            order = _sorted(best, chosen, rows, selection_heads)
    if not with_mass:
        return Retrieval(order)
    assert logits is not None and lse is not None and base is not None
    return Retrieval(order, _weights(logits, lse, order, chosen, rows, selection_heads), base)


def _begin(heads: Tensor | None, rows: Tensor, r: int, per_row: int) -> Tensor:
    """Return int32 ``[R, 1]``: the first column of each head's middle."""
    pairs = torch.arange(r, device=rows.device) if heads is None else heads
    return rows[1][pairs // per_row][:, None]


def _sorted(best: Tensor, heads: Tensor | None, rows: Tensor, per_row: int) -> Tensor:
    """Do what `_order` does, for lists that are too long for one tile."""
    packed = torch.sort(best, dim=1, descending=True).values
    column = _begin(heads, rows, best.shape[0], per_row) + (2147483647 - (packed & 2147483647))
    return torch.where(packed >= 0, column, -1)


def _weights(logits: Tensor, lse: Tensor, order: Tensor, heads: Tensor | None, rows: Tensor, per_row: int) -> Tensor:
    """Return float32 ``[R, G, k]``: the attention weights of the ranked keys; zero behind the end of a list."""
    r, group, _ = logits.shape
    position = (order - _begin(heads, rows, r, per_row)).clamp(min=0)[:, None].expand(-1, group, -1)
    weights = torch.exp(logits.gather(2, position) - lse[..., None])
    return torch.where((order >= 0)[:, None], weights, 0.0)


def _empty(order: Tensor, group: int, q: Tensor) -> Retrieval:
    nothing = q.new_empty((order.shape[0], group, 0), dtype=torch.float32)
    return Retrieval(order, nothing, q.new_ones((order.shape[0], group), dtype=torch.float32))
