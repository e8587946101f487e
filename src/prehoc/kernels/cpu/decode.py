"""Attention of one query a head over a plain or a paged cache, read in place. As in the reference backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prehoc.kernels.cpu.arguments import numbers, pointer, storage, strides
from prehoc.kernels.cpu.build import library
from prehoc.kernels.host import group_queries


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    with_lse: bool,
    first: tuple[int, ...] | None = None,
    sink: int = 0,
    start: tuple[int, ...] | None = None,
    indices: Tensor | None = None,
    lengths: Tensor | None = None,
    table: Tensor | None = None,
    weights: Tensor | None = None,
) -> Any:
    b, h, d = q.shape
    hs = k.shape[1] if indices is None else indices.shape[1]
    scaled = group_queries((q.float() * scale).contiguous(), hs, k.shape[1])
    groups, width = scaled.shape[2], 0 if indices is None else indices.shape[2]
    n = k.shape[2] if table is None else table.shape[1] * k.shape[2]
    lists = None if indices is None else indices.to(torch.int32).contiguous()
    counts = None if lengths is None else lengths.to(torch.int32).contiguous()
    out = torch.empty((b, h, v.shape[3]), dtype=torch.float32)
    lse = torch.empty((b, h), dtype=torch.float32)
    library().prehoc_decode(
        storage(k),
        pointer(scaled),
        pointer(k),
        pointer(v),
        strides(k, v, paged=table is not None),
        pointer(table),
        numbers((0, 0) if table is None else (table.shape[1], k.shape[2])),
        numbers((b, k.shape[1], hs, groups, d, v.shape[3], sink, n, width)),
        numbers(first or (0,) * b),
        numbers(start or (0,) * b),
        pointer(lists),
        pointer(counts),
        pointer(out),
        pointer(lse),
        pointer(weights),
    )
    return (out.to(q.dtype), lse) if with_lse else out.to(q.dtype)


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
    return _decode(q, k, v, scale, with_lse, first, sink, start)


def decode_weights(q: Tensor, k: Tensor, v: Tensor, first: tuple[int, ...], scale: float) -> tuple[Tensor, Tensor]:
    """Attend to every real key, and return how much each KV head's queries attended to each key.

    Parameters
    ----------
    q : Tensor
        ``[B, H, D]``.
    k, v : Tensor
        ``[B, Hkv, n, D]`` and ``[B, Hkv, n, Dv]``, unit stride in the last dimension.
    first : tuple of int
        Per row, the first real column.
    scale : float
        Factor on q.k before the softmax.

    Returns
    -------
    out : Tensor
        ``[B, H, Dv]`` of q's dtype.
    weights : Tensor
        float32 ``[B, Hkv, n]``, attention weights summed over the queries of a group; 0 before a row's first column.
    """
    weights = torch.empty((*k.shape[:2], k.shape[2]), dtype=torch.float32)
    return _decode(q, k, v, scale, False, first, 0, first, weights=weights), weights


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
    return _decode(q, k, v, scale, with_lse, indices=indices, lengths=lengths)


def decode_dense_paged(
    q: Tensor,
    k_blocks: Tensor,
    v_blocks: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
    with_lse: bool = False,
) -> Any:
    """Attend to every key of each row, kept in blocks; as in the reference backend."""
    return _decode(q, k_blocks, v_blocks, scale, with_lse, lengths=lengths, table=pages(block_table))


def decode_selected_paged(
    q: Tensor,
    k_blocks: Tensor,
    v_blocks: Tensor,
    block_table: Tensor,
    indices: Tensor,
    counts: Tensor,
    scale: float,
    with_lse: bool = False,
) -> Any:
    """Attend to selected keys by logical position, kept in blocks; as in the reference backend."""
    return _decode(q, k_blocks, v_blocks, scale, with_lse, indices=indices, lengths=counts, table=pages(block_table))


def pages(block_table: Tensor) -> Tensor:
    """Return the block table as the kernels read it."""
    return block_table.to(torch.int32).contiguous()
