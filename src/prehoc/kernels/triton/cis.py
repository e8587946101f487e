"""A whole step of CIS for one layer: gate, growth of the shared sets, and retrieval with dilation where the gate fails.

The gate writes one flag a head on the device; the kernels behind it start for every head, and return at once where the head
shares. So grids are fixed, nothing is asked of the device, and only heads that retrieve read their keys.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from prehoc.kernels.host import projected
from prehoc.kernels.triton import launch
from prehoc.kernels.triton.dilate import build
from prehoc.kernels.triton.score import score
from prehoc.kernels.triton.topk import best as best_of

# Untuned: chosen by arithmetic, never timed on a GPU.
WARPS = 4


@triton.jit(do_not_specialize=["columns", "local", "width", "block_size"])
def _gate(
    q,  # [B, H, D], contiguous: queries, or what they are compared by
    anchor,  # float32 [B, H, D]
    indices,  # int32 [B, Hs, width]
    lengths,  # int32 [B, Hs]
    age,  # int32 [B, Hs]
    retrieved,  # bool [B, Hs]
    cosine,  # float32 [B, Hs]
    columns,
    local,
    width,
    block_size,
    tau,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    FROZEN: tl.constexpr,
    G_PAD: tl.constexpr,
    D_PAD: tl.constexpr,
    LOCAL_PAD: tl.constexpr,
):
    """Decide for one head; move its set on when it shares, make its queries the new anchor when it does not."""
    pair = tl.program_id(0)
    g = tl.arange(0, G_PAD)
    d = tl.arange(0, D_PAD)
    valid = (g[:, None] < GROUP) & (d[None, :] < D)
    place = (pair.to(tl.int64) * GROUP + g)[:, None] * D + d[None, :]
    query = tl.load(q + place, mask=valid, other=0.0).to(tl.float32)
    unit = query / tl.sqrt(tl.sum(query * query, 1))[:, None]  # a zero query gives NaN: it never shares
    product = tl.sum(tl.where(valid, unit * tl.load(anchor + place, mask=valid, other=0.0), 0.0), 1)
    unknown = tl.sum(((product != product) & (g < GROUP)).to(tl.int32), 0) > 0
    least = tl.min(tl.where(g < GROUP, product, 1.0), 0)
    least = tl.where(unknown, float("nan"), tl.minimum(least, 1.0))
    old = tl.load(age + pair)
    old += (old >= 0).to(tl.int32)
    shares = (old >= 0) & (old < block_size) & (least > tau)
    need = (old < 0) | (old >= block_size) | (least <= tau) | unknown
    tl.store(cosine + pair, least)
    tl.store(retrieved + pair, need)
    tl.store(age + pair, tl.where(need, 0, old))
    tl.store(anchor + place, unit, mask=valid & (g[:, None] < tl.where(need, GROUP, 0)))
    length = tl.load(lengths + pair)
    line = indices + pair.to(tl.int64) * width
    if FROZEN:  # a set that retrieves is written anew
        tl.store(line + length, columns - 1, mask=shares & (length < width))
        tl.store(lengths + pair, length + 1, mask=shares & (length < width))
    else:  # the last `local` entries are consecutive columns: all move on by one
        j = length - local + tl.arange(0, LOCAL_PAD)
        moves = (j >= 0) & (j < tl.where(shares, length, 0))
        tl.store(line + j, tl.load(line + j, mask=moves, other=0) + 1, mask=moves)


def cis_step(
    q: Tensor,
    k: Tensor,
    state: Mapping[str, Tensor],
    first: tuple[int, ...],
    start: tuple[int, ...],
    sink: int,
    local: int,
    critical: tuple[int, ...],
    best: tuple[int, ...],
    limit: tuple[int, ...] | None,
    per_best: int | None,
    radius: int,
    block_size: int,
    frozen: bool,
    tau: float,
    scale: float,
    axes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Do a whole step of CIS (rolling refresh, exact top-k); arguments, state and results as in the CPU backend."""
    launch.check(q, k)
    (b, h, _), n, (_, hs, width) = q.shape, k.shape[2], state["indices"].shape
    q, group, device = q.contiguous(), h // hs, q.device
    vectors = q if axes is None else projected(q, axes)
    retrieved = torch.empty((b, hs), dtype=torch.bool, device=device)
    cosine = torch.empty((b, hs), dtype=torch.float32, device=device)
    rows = launch.per_row(device, first, start, best, critical, (0,) * b if limit is None else limit)
    with torch.cuda.device_of(q):
        _gate[(b * hs,)](
            vectors,
            *(state[name] for name in ("anchor", "indices", "lengths", "age")),
            retrieved,
            cosine,
            n,
            local,
            width,
            block_size,
            tau,
            GROUP=group,
            D=vectors.shape[2],
            FROZEN=frozen,
            G_PAD=launch.padded(group),
            D_PAD=launch.padded(vectors.shape[2]),
            LOCAL_PAD=launch.padded(local),
            num_warps=WARPS,
        )
        gate = retrieved.view(-1)
        sizes = (hs, sink, local, n - local - min(start), scale)
        found = score(q, k, None, gate, rows[0], rows[1], *sizes, stats=group > 1, mean=False, columns=n)
        order = best_of(found.bits, rows[1], None, gate, hs, n - local, max(critical))
        lists, lengths = state["indices"].view(-1, width), state["lengths"].view(-1)
        more = (per_best or 1) if limit is not None else 1
        build(order, gate, tuple(rows), hs, n, sink, local, radius, more, limit is not None, lists, lengths)
    return retrieved, cosine
