"""Attention of one query a head: over a range, over selected keys, over paged blocks. Split over keys, merged by LSE.

One kernel serves all four forms; they differ in how the j-th key to read becomes a row of memory. A program reads its keys
once for all the query heads that share them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from prehoc.kernels.triton import launch

# Untuned: chosen by arithmetic, never timed on a GPU.
TILE_BYTES = 16384  # of one tile of keys: 64 keys of 128 bfloat16
LEAST_KEYS, MOST_KEYS = 16, 128
WARPS, STAGES = 4, 3
GATHER_STAGES = 5  # the index comes before the keys, so that a stage of keys costs two
DOT_ROWS = 16  # a matrix product needs that many queries; fewer are padded


def tile_keys(d: int, itemsize: int) -> int:
    """Return the keys of one tile for head size `d`."""
    return min(max(TILE_BYTES // (launch.padded(d, 16) * itemsize), LEAST_KEYS), MOST_KEYS)


@triton.jit
def dots(q, keys, GROUP: tl.constexpr):
    """Return q.k in float32 ``[G, N]`` for queries ``[G, D]`` and keys ``[N, D]``."""
    if GROUP == 1:  # a lone query would leave a matrix unit idle
        return tl.sum(q.to(tl.float32) * keys.to(tl.float32), 1)[None, :]
    else:
        return tl.dot(q, tl.trans(keys), input_precision="ieee")


@triton.jit
def _weigh(weights, values, GROUP: tl.constexpr):
    """Return the weighted sum of values in float32 ``[G, Dv]`` for weights ``[G, N]`` and values ``[N, Dv]``."""
    if GROUP == 1:
        return tl.sum(tl.trans(weights) * values.to(tl.float32), 0)[None, :]
    else:
        return tl.dot(weights.to(values.dtype), values, input_precision="ieee")


@triton.jit
def locate(column, inside, row, table, table_b, BLOCK: tl.constexpr):
    """Return where columns lie, int64 ``[N]``: the row and the column, or when paged the block and the place in it."""
    if BLOCK:
        outer = tl.load(table + row.to(tl.int64) * table_b + column // BLOCK, mask=inside, other=0)
        return outer.to(tl.int64), (column % BLOCK).to(tl.int64)
    else:
        return row.to(tl.int64), column.to(tl.int64)


@triton.jit(do_not_specialize=["columns", "sink", "width"])
def _attend(
    q,  # [B, H, D], contiguous
    k,
    v,
    out,  # [B, H, splits, Dv]
    lse,  # float32 [B, H, splits]
    rows,  # int32 [2, B]: first and start; not read by selected and paged forms
    lists,  # int32 [B, Hs, width], when SELECTED
    counts,  # int32 [B, Hs] when SELECTED, [B] when paged
    table,  # int32 [B, blocks], when paged
    columns,
    sink,
    width,
    scale,
    batch,
    kv_heads,
    heads_per_kv,
    k_b,  # strides: of a row, or of a block when paged
    k_h,
    k_n,
    k_d,
    v_b,
    v_h,
    v_n,
    v_d,
    table_b,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    SELECTED: tl.constexpr,
    BLOCK: tl.constexpr,  # keys a block; 0: not paged
    UPCAST: tl.constexpr,  # the interpreter multiplies no 16 bit matrices
    G_PAD: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    N: tl.constexpr,
):
    """Attend for one selection head of one row to one split of its keys."""
    pair = tl.program_id(0)
    split, parts = tl.program_id(1), tl.num_programs(1)
    row = pair // (kv_heads * heads_per_kv)
    kv = (pair % (kv_heads * heads_per_kv)) // heads_per_kv
    first, start, lead = 0, 0, 0
    if SELECTED:
        count = tl.load(counts + pair)
    elif BLOCK:
        count = tl.load(counts + row)
    else:
        first, start = tl.load(rows + row), tl.load(rows + batch + row)
        lead = tl.where(start <= first + sink, 0, sink)  # a range that meets its sinks is one range
        start = tl.where(start <= first + sink, first, start)
        count = lead + tl.maximum(columns - start, 0)
    chunk = tl.cdiv(tl.cdiv(count, parts), N) * N
    begin = split * chunk
    end = tl.minimum(begin + chunk, count)

    g, d, dv = tl.arange(0, G_PAD), tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    head = pair * GROUP + g  # row * H + query head
    query = tl.load(q + head[:, None] * D + d[None, :], mask=(g[:, None] < GROUP) & (d[None, :] < D), other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    most = tl.full([G_PAD], float("-inf"), tl.float32)
    total = tl.zeros([G_PAD], tl.float32)
    mean = tl.zeros([G_PAD, DV_PAD], tl.float32)
    k_base, v_base = k + kv.to(tl.int64) * k_h, v + kv.to(tl.int64) * v_h
    for at in range(begin, end, N):
        j = at + tl.arange(0, N)
        inside = j < end
        if SELECTED:
            column = tl.load(lists + pair.to(tl.int64) * width + j, mask=inside, other=0)
        elif BLOCK:
            column = j
        else:
            column = tl.where(j < lead, first + j, start + j - lead)
        outer, inner = locate(column, inside, row, table, table_b, BLOCK)
        keys = tl.load(
            k_base + (outer * k_b + inner * k_n)[:, None] + d[None, :] * k_d,
            mask=inside[:, None] & (d[None, :] < D),
            other=0.0,
        )
        values = tl.load(
            v_base + (outer * v_b + inner * v_n)[:, None] + dv[None, :] * v_d,
            mask=inside[:, None] & (dv[None, :] < DV),
            other=0.0,
        )
        if UPCAST:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        logits = dots(query, keys, GROUP) * (scale * 1.4426950408889634)  # [G, N], base 2
        logits = tl.where(inside[None, :], logits, float("-inf"))
        higher = tl.maximum(most, tl.max(logits, 1))
        shrink = tl.exp2(most - higher)
        weights = tl.exp2(logits - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        mean = mean * shrink[:, None] + _weigh(weights, values, GROUP)
        most = higher
    filled = total > 0  # an empty split: no mass, zeros
    safe = tl.where(filled, total, 1.0)
    mass = tl.where(filled, (most + tl.log2(safe)) * 0.6931471805599453, float("-inf"))
    at = head * parts + split
    tl.store(lse + at, mass, mask=g < GROUP)
    mean = (mean / safe[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * DV + dv[None, :], mean, mask=(g[:, None] < GROUP) & (dv[None, :] < DV))


@triton.jit
def _merge(parts, masses, out, lse, count, DV: tl.constexpr, S_PAD: tl.constexpr, DV_PAD: tl.constexpr):
    """Merge one head's partial outputs ``[S, Dv]`` by their LSE ``[S]``."""
    head = tl.program_id(0)
    s, dv = tl.arange(0, S_PAD), tl.arange(0, DV_PAD)
    mass = tl.load(masses + head * count + s, mask=s < count, other=float("-inf"))
    most = tl.max(mass, 0)
    weight = tl.where(mass == float("-inf"), 0.0, tl.exp(mass - most))
    total = tl.sum(weight, 0)
    part = tl.load(
        parts + (head * count + s)[:, None] * DV + dv[None, :],
        mask=(s[:, None] < count) & (dv[None, :] < DV),
        other=0.0,
    )
    safe = tl.where(total > 0, total, 1.0)
    mean = tl.sum(part * weight[:, None], 0) / safe
    tl.store(out + head * DV + dv, mean.to(out.dtype.element_ty), mask=dv < DV)
    tl.store(lse + head, tl.where(total > 0, most + tl.log(safe), float("-inf")))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    with_lse: bool,
    keys: int,
    *,
    rows: Tensor | None = None,
    sink: int = 0,
    lists: Tensor | None = None,
    counts: Tensor | None = None,
    table: Tensor | None = None,
) -> Any:
    """Attend to at most `keys` keys of each head, as the operations that call this say; the arguments name the form."""
    launch.check(q, k, v)
    (b, h, d), hkv, dv = q.shape, k.shape[1], v.shape[3]
    hs = hkv if lists is None else lists.shape[1]
    if hs not in (h, hkv):
        raise ValueError(f"{hs} selection heads fit neither {h} query heads nor {hkv} KV heads")
    parts, group = launch.splits(keys, b * hs, q.device, launch.WAVES), h // hs
    out, lse = q.new_empty((b, h, dv)), q.new_empty((b, h), dtype=torch.float32)
    split_out = out if parts == 1 else q.new_empty((b, h, parts, dv), dtype=torch.float32)
    split_lse = lse if parts == 1 else lse.new_empty((b, h, parts))
    with torch.cuda.device_of(q):
        _attend[(b * hs, parts)](
            q.contiguous(),
            k,
            v,
            split_out,
            split_lse,
            rows,
            lists,
            counts,
            table,
            k.shape[2],
            sink,
            0 if lists is None else lists.shape[2],
            scale,
            b,
            hkv,
            hs // hkv,
            *k.stride(),
            *v.stride(),
            0 if table is None else table.stride(0),
            GROUP=group,
            D=d,
            DV=dv,
            SELECTED=lists is not None,
            BLOCK=0 if table is None else k.shape[2],
            UPCAST=launch.INTERPRETED,
            G_PAD=1 if group == 1 else launch.padded(group, DOT_ROWS),
            D_PAD=launch.padded(d, 16),
            DV_PAD=launch.padded(dv, 16),
            N=tile_keys(max(d, dv), k.element_size()),
            num_warps=WARPS,
            num_stages=STAGES if lists is None and table is None else GATHER_STAGES,
        )
        if parts > 1:
            sizes = {"S_PAD": launch.padded(parts), "DV_PAD": launch.padded(dv, 16)}
            _merge[(b * h,)](split_out, split_lse, out, lse, parts, DV=dv, **sizes, num_warps=WARPS)
    return (out, lse) if with_lse else out


def decode_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: tuple[int, ...],
    sink: int,
    start: tuple[int, ...],
    scale: float,
    with_lse: bool = False,
) -> Any:
    """Attend to each row's first `sink` real keys and to every column from `start` on; as in the reference backend."""
    keys = k.shape[2] - min(start) + sink
    return attend(q, k, v, scale, with_lse, keys, rows=launch.per_row(q.device, first, start), sink=sink)


def decode_selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    lengths: Tensor,
    scale: float,
    full: bool = False,
    with_lse: bool = False,
) -> Any:
    """Attend to the selected keys only, read in place; as in the reference backend."""
    lists, counts = indices.contiguous(), lengths.to(torch.int32).contiguous()
    return attend(q, k, v, scale, with_lse, indices.shape[2], lists=lists, counts=counts)
