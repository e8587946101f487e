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
from prehoc.kernels.cpu.build import BuildError, library
from prehoc.kernels.host import group_queries
from prehoc.kernels.reference import Retrieval

READS_IN_PLACE = True
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

__all__ = [
    "READS_IN_PLACE",
    "BuildError",
    "cis_step",
    "decode_compact",
    "decode_dense",
    "decode_selected",
    "dilate",
    "library",
    "retrieve",
]

decode_compact = reference.decode_compact


def _pointer(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def _numbers(values: tuple[int, ...]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def _strides(k: Tensor, v: Tensor | None = None) -> Any:
    if k.stride(3) != 1 or (v is not None and v.stride(3) != 1):
        raise ValueError("keys and values must be contiguous along the head dimension")
    return _numbers((*k.stride()[:3], *(v.stride()[:3] if v is not None else ())))


def _type(x: Tensor) -> int:
    if x.dtype not in _TYPES:
        raise ValueError(f"dtype {x.dtype} is not supported by the cpu backend; use float32, bfloat16 or float16")
    return _TYPES[x.dtype]


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    selection_heads: int,
    first: tuple[int, ...],
    sink: int,
    start: tuple[int, ...],
    indices: Tensor | None,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor]:
    b, h, d = q.shape
    scaled = group_queries((q.float() * scale).contiguous(), selection_heads, k.shape[1])
    groups, width = scaled.shape[2], 0 if indices is None else indices.shape[2]
    out = torch.empty((b, h, v.shape[3]), dtype=torch.float32)
    lse = torch.empty((b, h), dtype=torch.float32)
    sizes = _numbers((b, k.shape[1], selection_heads, groups, d, v.shape[3], sink, k.shape[2], width))
    library().prehoc_decode(
        _type(k),
        _pointer(scaled),
        _pointer(k),
        _pointer(v),
        _strides(k, v),
        None,
        _numbers((0, 0)),
        sizes,
        _numbers(first),
        _numbers(start),
        _pointer(indices),
        _pointer(lengths),
        _pointer(out),
        _pointer(lse),
    )
    return out.to(q.dtype), lse


def decode_dense(
    q: Tensor, k: Tensor, v: Tensor, first: tuple[int, ...], sink: int, start: tuple[int, ...], scale: float
) -> Tensor:
    """Attend to each row's first `sink` real keys and to every column from `start` on; as in the reference backend."""
    return _decode(q, k, v, scale, k.shape[1], first, sink, start, None, None)[0]


def decode_selected(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, lengths: Tensor, scale: float, full: bool = False
) -> Tensor:
    """Attend to the selected keys only, read in place; as in the reference backend."""
    nothing = (0,) * q.shape[0]
    lists, counts = indices.contiguous(), lengths.to(torch.int32).contiguous()
    return _decode(q, k, v, scale, indices.shape[1], nothing, 0, nothing, lists, counts)[0]


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
    sizes = (chosen.numel(), k.shape[1], selection_heads, groups, d, sink, local, n, topk, groups > 1, reduce == "mean")
    library().prehoc_retrieve(
        _type(k),
        _pointer(scaled),
        _pointer(k),
        _strides(k),
        None,
        _numbers((0, 0)),
        _numbers(tuple(int(x) for x in sizes)),
        _pointer(chosen),
        _numbers(first),
        _numbers(start),
        None,
        _pointer(order),
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
        _pointer(order.contiguous()),
        *(ctypes.c_int64(x) for x in (r, k)),
        _pointer(held[0]),
        _pointer(held[1]),
        *(ctypes.c_int64(x) for x in (columns, sink, local, radius)),
        _pointer(held[2]),
        _pointer(held[3]),
        _pointer(most),
        *(ctypes.c_int64(x) for x in (per_best or 1, width)),
        _pointer(lists),
        _pointer(lengths),
    )
    return lists[:, : int(lengths.max())], lengths


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
) -> tuple[Tensor, Tensor]:
    """Do a whole step of CIS (rolling refresh, exact top-k) in one call: gate, growth of the sets, retrieval, dilation.

    Parameters
    ----------
    q : Tensor
        ``[B, H, D]``.
    k : Tensor
        ``[B, Hkv, n, D]``.
    state : mapping
        Updated in place, all contiguous: ``indices`` int32 ``[B, Hs, W]``, ``lengths`` and ``age`` int32 ``[B, Hs]``
        (age < 0: no set), ``anchor`` float32 ``[B, H, D]`` (NaN: none).
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
    hkv, n, d = k.shape[1:]
    retrieved, cosine = torch.empty((b, hs), dtype=torch.bool), torch.empty((b, hs))
    sizes = (b, hkv, hs, q.shape[1] // hs, d, sink, local, n, max(critical), radius, per_best or 1, width)
    library().prehoc_cis(
        _type(k),
        _pointer(query),
        ctypes.c_double(scale),
        ctypes.c_double(tau),
        _pointer(k),
        _strides(k),
        _numbers((*sizes, block_size, int(frozen))),
        _numbers(first),
        _numbers(start),
        _numbers(critical),
        _numbers(best),
        None if limit is None else _numbers(limit),
        *(_pointer(state[name]) for name in ("indices", "lengths", "age", "anchor")),
        _pointer(retrieved),
        _pointer(cosine),
    )
    return retrieved, cosine
