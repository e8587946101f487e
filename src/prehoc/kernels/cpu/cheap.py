"""Cheap retrieval in C++: an int8 copy of the keys is scored first, and only the best of it exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from prehoc.kernels.cpu.arguments import numbers, pointer, storage, strides
from prehoc.kernels.cpu.build import library
from prehoc.kernels.host import group_queries
from prehoc.kernels.reference import Retrieval


def retrieve_compact(
    q: Tensor,
    k: Tensor,
    codes: Tensor,
    scales: Tensor,
    heads: Tensor | None,
    selection_heads: int,
    first: tuple[int, ...],
    start: tuple[int, ...],
    sink: int,
    local: int,
    topk: int,
    scale: float,
    rerank: int = 2,
    reduce: str = "max",
) -> Retrieval:
    """Return the best keys of each head's middle among the best by compact score; as in the reference backend."""
    b, _, d = q.shape
    scaled = group_queries((q.float() * scale).contiguous(), selection_heads, k.shape[1])
    chosen = torch.arange(b * selection_heads) if heads is None else heads.to(torch.int64).contiguous()
    n, places = k.shape[2], (*strides(k)[:3], *strides(codes)[:3], *scales.stride()[:2])
    if codes.dtype != torch.int8 or scales.dtype != torch.float32 or scales.stride(2) != 1:
        raise ValueError(
            "codes must be int8 and scales float32, contiguous along the columns, as compact() returns them"
        )
    topk = min(topk, max(n - min(start) - local, 0))
    order = torch.empty((chosen.numel(), topk), dtype=torch.int64)
    sizes = (chosen.numel(), k.shape[1], selection_heads, scaled.shape[2], d, sink, local, n, topk)
    library().prehoc_retrieve_cheap(
        storage(k),
        pointer(scaled),
        pointer(k),
        pointer(codes),
        pointer(scales),
        numbers(places),
        numbers((*sizes, int(reduce == "mean"), rerank * topk)),
        pointer(chosen),
        numbers(first),
        numbers(start),
        pointer(order),
    )
    return Retrieval(order)
