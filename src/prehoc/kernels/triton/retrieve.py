"""Exact retrieval on the device: score the middle, take the best; over a cache, and over one in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from prehoc.kernels.host import group_queries
from prehoc.kernels.reference import Retrieval
from prehoc.kernels.triton import launch
from prehoc.kernels.triton.score import score
from prehoc.kernels.triton.topk import begin, best


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
            rows[0],
            rows[1],
            selection_heads,
            sink,
            local,
            end - min(start),
            scale,
            stats=group > 1 or with_mass,
            mean=reduce == "mean",
            columns=k.shape[2],
        )
        order = best(found.bits, rows[1], chosen, None, selection_heads, end, topk)
    if not with_mass:
        return Retrieval(order)
    assert found.logits is not None and found.lse is not None
    position = (order - begin(rows[1], chosen, r, selection_heads)).clamp(min=0)[:, None].expand(-1, group, -1)
    weights = torch.exp(found.logits.gather(2, position) - found.lse[..., None])  # [R, G, k]
    return Retrieval(order, torch.where((order >= 0)[:, None], weights, 0.0), found.base)


def retrieve_paged(
    q: Tensor,
    k_blocks: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    heads: Tensor | None,
    selection_heads: int,
    sink: int,
    local: int,
    topk: int,
    scale: float,
    reduce: str = "max",
) -> Retrieval:
    """Return the best keys of each row's middle ``[sink, length - local)``, by logical position; as in the reference backend."""
    launch.check(q, k_blocks)
    q, group = q.contiguous(), group_queries(q, selection_heads, k_blocks.shape[1]).shape[2]
    r = q.shape[0] * selection_heads if heads is None else heads.numel()
    middle = block_table.shape[1] * k_blocks.shape[2] - sink - local
    if r == 0 or topk == 0 or middle <= 0:
        return Retrieval(torch.full((r, topk), -1, dtype=torch.int64, device=q.device))
    chosen = None if heads is None else heads.contiguous()
    columns = lengths.to(torch.int32).contiguous()
    with torch.cuda.device_of(q):
        found = score(
            q,
            k_blocks,
            chosen,
            None,
            0,
            sink,
            selection_heads,
            sink,
            local,
            middle,
            scale,
            stats=group > 1,
            mean=reduce == "mean",
            columns=columns,
            table=block_table,
        )
        return Retrieval(best(found.bits, sink, chosen, None, selection_heads, columns - local, topk))
