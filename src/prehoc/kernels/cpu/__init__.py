"""The CPU backend: C++ with OpenMP and SIMD. Same operations, shapes and meaning as the reference backend.

Selected keys are read in place and a key row once for its whole group; long heads are split so that every thread works.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from prehoc.kernels import reference
from prehoc.kernels.cpu.arguments import numbers, pointer, storage, strides
from prehoc.kernels.cpu.build import BuildError, library
from prehoc.kernels.cpu.cheap import retrieve_compact
from prehoc.kernels.cpu.decode import (
    decode_dense,
    decode_dense_paged,
    decode_selected,
    decode_selected_paged,
    decode_weights,
    pages,
)
from prehoc.kernels.cpu.stream import gather, stream
from prehoc.kernels.host import group_queries
from prehoc.kernels.reference import Retrieval

READS_IN_PLACE = True

__all__ = [
    "READS_IN_PLACE",
    "BuildError",
    "cis_step",
    "compact",
    "decode_compact",
    "decode_dense",
    "decode_dense_paged",
    "decode_selected",
    "decode_selected_paged",
    "decode_weights",
    "dilate",
    "gather",
    "library",
    "retrieve",
    "retrieve_compact",
    "retrieve_paged",
    "stream",
]

compact, decode_compact = reference.compact, reference.decode_compact


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
    if with_mass:  # weights of the ranked keys are asked for: the torch path has them at hand
        return reference.retrieve(
            q, k, heads, selection_heads, first, start, sink, local, topk, scale, with_mass, reduce
        )
    b, _, d = q.shape
    scaled = group_queries((q.float() * scale).contiguous(), selection_heads, k.shape[1])
    chosen = torch.arange(b * selection_heads) if heads is None else heads.to(torch.int64).contiguous()
    groups, n = scaled.shape[2], k.shape[2]
    topk = min(topk, max(n - min(start) - local, 0))
    order = torch.empty((chosen.numel(), topk), dtype=torch.int64)
    sizes = (chosen.numel(), k.shape[1], selection_heads, groups, d, sink, local, n, topk, reduce == "mean")
    library().prehoc_retrieve(
        storage(k),
        pointer(scaled),
        pointer(k),
        strides(k),
        None,
        numbers((0, 0)),
        numbers(tuple(int(x) for x in sizes)),
        pointer(chosen),
        numbers(first),
        numbers(start),
        None,
        pointer(order),
    )
    return Retrieval(order)


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
    """Return the best keys of each row's middle, by logical position; as in the reference backend."""
    b, _, d = q.shape
    scaled = group_queries((q.float() * scale).contiguous(), selection_heads, k_blocks.shape[1])
    chosen = torch.arange(b * selection_heads) if heads is None else heads.to(torch.int64).contiguous()
    table, ends = pages(block_table), lengths.to(torch.int32).contiguous()
    order = torch.empty((chosen.numel(), topk), dtype=torch.int64)
    groups = scaled.shape[2]
    sizes = (chosen.numel(), k_blocks.shape[1], selection_heads, groups, d, sink, local, int(ends.max()), topk)
    library().prehoc_retrieve(
        storage(k_blocks),
        pointer(scaled),
        pointer(k_blocks),
        strides(k_blocks, paged=True),
        pointer(table),
        numbers((table.shape[1], k_blocks.shape[2])),
        numbers((*sizes, int(reduce == "mean"))),
        pointer(chosen),
        numbers((0,) * b),
        numbers((sink,) * b),
        pointer(ends),
        pointer(order),
    )
    return Retrieval(order)


def dilate(
    order: Tensor,
    first: Tensor,
    start: Tensor,
    columns: int,
    sink: int,
    local: int,
    radius: int,
    best: Tensor | int,
    critical: Tensor | int,
    limit: Tensor | int | None = None,
    per_best: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the dilated lists; as in the reference backend."""
    r, k = order.shape

    def rows(value: Tensor | int) -> Tensor:
        return torch.as_tensor(value, dtype=torch.int64).expand(r, 1).contiguous()

    held = [rows(value) for value in (first, start, best, critical)]
    most = None if limit is None else rows(limit)
    width = min(columns, sink + local + k + 2 * radius * min(k, int(held[2].max())))
    lists = torch.empty((r, width), dtype=torch.int32)
    lengths = torch.empty(r, dtype=torch.int32)
    library().prehoc_dilate(
        pointer(order.contiguous()),
        *(ctypes.c_int64(x) for x in (r, k)),
        pointer(held[0]),
        pointer(held[1]),
        *(ctypes.c_int64(x) for x in (columns, sink, local, radius)),
        pointer(held[2]),
        pointer(held[3]),
        pointer(most),
        *(ctypes.c_int64(x) for x in (per_best or 1, width)),
        pointer(lists),
        pointer(lengths),
    )
    return lists[:, : int(lengths.max())], lengths


def cis_step(
    q: Tensor,
    k: Tensor,
    state: Mapping[str, Any],
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
    rerank: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Do a whole step of CIS (rolling refresh, no mass) in one call: gate, growth of the sets, retrieval, dilation.

    Parameters
    ----------
    q : Tensor
        ``[B, H, D]``.
    k : Tensor
        ``[B, Hkv, n, D]``.
    state : mapping
        Tensors are updated in place, all contiguous: ``indices`` int32 ``[B, Hs, W]``, ``lengths`` and ``age`` int32 ``[B, Hs]``
        (age < 0: no set), ``anchor`` float32 ``[B, H, C]`` (NaN: none).
    first, start : tuple of int
        Per row, the first real column and the first column of the middle, which must be larger than `critical`.
    sink, local, radius, block_size : int
        Sizes.
    critical, best, limit : tuple of int
        Per row, as in `dilate`; `per_best` too.
    frozen : bool
        Whether the local window grows with the block (else it slides).
    tau, scale : float
        Least cosine of a shared set (exclusive), and the factor on the logits.
    axes : Tensor, optional
        ``[B, Hkv, D, C]``: the gate compares the queries along these (default: the queries, C = D).
    rerank : int, optional
        A retrieval scores the compact copy in `state`, ``codes`` int8 ``[B, Hkv, room, D]`` and ``scales`` float32
        ``[B, Hkv, room]`` of the first ``coded`` columns, and then this many keys for each critical one exactly. The columns
        that the copy lacks are added when a head retrieves.

    Returns
    -------
    retrieved : Tensor
        bool ``[B, Hs]``.
    cosine : Tensor
        float32 ``[B, Hs]``, NaN without an anchor.
    """
    indices = state["indices"]
    b, hs, width = indices.shape
    query = q.float().contiguous()
    axes = None if axes is None else axes.float().contiguous()
    hkv, n, d = k.shape[1:]
    retrieved, cosine = torch.empty((b, hs), dtype=torch.bool), torch.empty((b, hs))
    sizes = (b, hkv, hs, q.shape[1] // hs, d, sink, local, n, max(critical), radius, per_best or 1, width)
    library().prehoc_cis(
        storage(k),
        pointer(query),
        None if axes is None else pointer(axes),
        ctypes.c_int64(state["anchor"].shape[2]),
        ctypes.c_double(scale),
        ctypes.c_double(tau),
        pointer(k),
        strides(k),
        numbers((*sizes, block_size, int(frozen))),
        numbers(first),
        numbers(start),
        numbers(critical),
        numbers(best),
        None if limit is None else numbers(limit),
        *((None, None) if rerank is None else (pointer(state["codes"]), pointer(state["scales"]))),
        numbers((0, 0, 0) if rerank is None else (state["codes"].shape[2], state["coded"], rerank * max(critical))),
        *(pointer(state[name]) for name in ("indices", "lengths", "age", "anchor")),
        pointer(retrieved),
        pointer(cosine),
    )
    return retrieved, cosine
