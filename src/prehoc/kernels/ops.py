"""The decode operations as torch custom ops ``prehoc::…``, through which ``torch.compile(fullgraph=True)`` passes.

Each function takes the arguments of the backends' operation of the same name, and a backend. Inside a graph that is being
compiled it leaves one opaque call, whose sizes follow from its arguments; anywhere else it calls the backend at once.
Nothing of the package imports this module by itself: the ops are registered by whoever needs them. They have no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prehoc import kernels
from prehoc.kernels.reference import Retrieval

__all__ = ["cis_step", "decode_dense", "decode_selected", "dilate", "library", "register", "retrieve"]

# torch.library.custom_op does the same at several times the cost of a call
library = torch.library.Library("prehoc", "FRAGMENT")


def register(signature: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register one op and return it.

    Parameters
    ----------
    signature : str
        Its schema, without a namespace.
    run : callable
        What it does, on any device.
    fake : callable
        Returns empty tensors of the shapes and dtypes that `run` returns, contiguous as those must be.

    Returns
    -------
    OpOverload
    """
    name = signature.partition("(")[0]
    library.define(signature)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"prehoc::{name}", fake, lib=library)
    return getattr(torch.ops.prehoc, name).default


def decode_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: tuple[int, ...],
    sink: int,
    start: tuple[int, ...],
    scale: float,
    backend: str = "auto",
) -> Tensor:
    """Attend to each row's first `sink` real keys and to every column from `start` on.

    Arguments and result as in `prehoc.kernels.reference.decode_dense`; q ``[B, H, D]``, result ``[B, H, Dv]``.
    """
    if torch.compiler.is_compiling():
        return _DECODE_DENSE(q, k, v, first, sink, start, scale, backend)  # type: ignore[no-any-return]
    return _run_decode_dense(q, k, v, first, sink, start, scale, backend)


def decode_selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    lengths: Tensor,
    scale: float,
    full: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Attend to the selected keys only.

    Arguments and result as in `prehoc.kernels.reference.decode_selected`; q ``[B, H, D]``, result ``[B, H, Dv]``.
    """
    if torch.compiler.is_compiling():
        return _DECODE_SELECTED(q, k, v, indices, lengths, scale, full, backend)  # type: ignore[no-any-return]
    return _run_decode_selected(q, k, v, indices, lengths, scale, full, backend)


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
    backend: str = "auto",
) -> Retrieval:
    """Score the middle of each chosen head exactly and return its best keys, as `prehoc.kernels.reference.retrieve` does."""
    arguments = (q, k, heads, selection_heads, first, start, sink, local, topk, scale, with_mass, reduce, backend)
    order, weights, base = (_RETRIEVE if torch.compiler.is_compiling() else _run_retrieve)(*arguments)
    return Retrieval(order, weights, base) if with_mass else Retrieval(order)


def dilate(
    order: Tensor,
    first: Tensor | int,
    start: Tensor | int,
    columns: int,
    sink: int,
    local: int,
    radius: int,
    best: Tensor | int,
    critical: Tensor | int,
    limit: Tensor | int | None = None,
    per_best: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return the dilated lists, as `prehoc.kernels.reference.dilate` does.

    In a compiled graph nothing may depend on the values of tensors: there the lists ``[R, K]`` are as wide as the arguments
    allow at most, with more -1 behind.
    """
    if not torch.compiler.is_compiling():
        sizes = (columns, sink, local, radius)
        found = kernels.get(backend, order.device).dilate(order, first, start, *sizes, best, critical, limit, per_best)
        return found  # type: ignore[no-any-return]
    k = order.shape[1]
    dilated = torch.sym_min(best, k) if isinstance(best, int) else k
    width = torch.sym_min(columns, sink + local + k + 2 * radius * dilated)
    numbers = [_column(x, order) for x in (first, start, best, critical)]
    most = None if limit is None else _column(limit, order)
    sizes = (columns, sink, local, radius)
    return _DILATE(order, *numbers, most, *sizes, per_best, width, backend)  # type: ignore[no-any-return]


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
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Do a whole step of CIS on the tensors of `state`, in place, as `prehoc.kernels.cpu.cis_step` does.

    Raises
    ------
    ValueError
        Where the backend has no such operation.
    """
    held = [state[name] for name in _STATE]
    sizes = (first, start, sink, local, critical, best, limit, per_best, radius)
    gate = (block_size, frozen, tau, scale, axes)
    if torch.compiler.is_compiling():
        return _CIS_STEP(q, k, *held, *sizes, *gate, backend)  # type: ignore[no-any-return]
    return _run_cis_step(q, k, *held, *sizes, *gate, backend)


_STATE = ("indices", "lengths", "age", "anchor")


def _column(value: Tensor | int, like: Tensor) -> Tensor:
    """Return int64 ``[R, 1]`` on the device of `like` ``[R, k]``."""
    if isinstance(value, Tensor):
        return value.to(torch.int64).expand(like.shape[0], 1)
    return torch.full((like.shape[0], 1), value, dtype=torch.int64, device=like.device)


def _ops(backend: str, at: Tensor) -> ModuleType:
    return kernels.get(backend, at.device)


def _run_decode_dense(
    q: Tensor, k: Tensor, v: Tensor, first: Sequence[int], sink: int, start: Sequence[int], scale: float, backend: str
) -> Tensor:
    out: Tensor = _ops(backend, q).decode_dense(q, k, v, tuple(first), sink, tuple(start), scale)
    return out.contiguous()


def _run_decode_selected(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, lengths: Tensor, scale: float, full: bool, backend: str
) -> Tensor:
    out: Tensor = _ops(backend, q).decode_selected(q, k, v, indices, lengths, scale, full)
    return out.contiguous()


def _fake_decode(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], v.shape[3]))


def _run_retrieve(
    q: Tensor,
    k: Tensor,
    heads: Tensor | None,
    selection_heads: int,
    first: Sequence[int],
    start: Sequence[int],
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    *rest, backend = arguments
    found = _ops(backend, q).retrieve(q, k, heads, selection_heads, tuple(first), tuple(start), *rest)
    weights, base = (_nothing(q) if x is None else x.contiguous() for x in (found.weights, found.base))
    return found.order.contiguous(), weights, base


def _fake_retrieve(
    q: Tensor, k: Tensor, heads: Tensor | None, selection_heads: int, first: Any, start: Sequence[int], *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _, local, topk, _, with_mass, *_ = arguments
    rows = q.shape[0] * selection_heads if heads is None else heads.shape[0]
    groups, middle = q.shape[1] // selection_heads, torch.sym_max(k.shape[2] - min(start) - local, 0)
    order = q.new_empty((rows, torch.sym_min(topk, middle)), dtype=torch.int64)
    if not with_mass:
        return order, _nothing(q), _nothing(q)
    weights = q.new_empty((rows, groups, order.shape[1]), dtype=torch.float32)
    return order, weights, q.new_empty((rows, groups), dtype=torch.float32)


def _nothing(at: Tensor) -> Tensor:
    return at.new_empty(0, dtype=torch.float32)


def _run_dilate(
    order: Tensor, first: Tensor, start: Tensor, best: Tensor, critical: Tensor, limit: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor]:
    *sizes, per_best, width, backend = arguments
    lists, lengths = _ops(backend, order).dilate(order, first, start, *sizes, best, critical, limit, per_best)
    return F.pad(lists[:, :width], (0, max(width - lists.shape[1], 0)), value=-1).contiguous(), lengths.contiguous()


def _fake_dilate(order: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    rows, width = order.shape[0], arguments[-2]
    return order.new_empty((rows, width), dtype=torch.int32), order.new_empty(rows, dtype=torch.int32)


def _run_cis_step(q: Tensor, k: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *rest, backend = arguments
    native = getattr(_ops(backend, q), "cis_step", None)
    if native is None:
        raise ValueError(
            f"backend {backend!r} does not do a step of CIS in one operation on {q.device}; use backend 'cpu'"
        )
    rest = [tuple(x) if isinstance(x, list) else x for x in rest]
    return native(q, k, dict(zip(_STATE, rest, strict=False)), *rest[len(_STATE) :])  # type: ignore[no-any-return]


def _fake_cis_step(q: Tensor, k: Tensor, indices: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    pairs = indices.shape[:2]
    return q.new_empty(pairs, dtype=torch.bool), q.new_empty(pairs, dtype=torch.float32)


_DECODE_DENSE = register(
    "decode_dense(Tensor q, Tensor k, Tensor v, SymInt[] first, SymInt sink, SymInt[] start"
    ", float scale, str backend) -> Tensor",
    _run_decode_dense,
    _fake_decode,
)
_DECODE_SELECTED = register(
    "decode_selected(Tensor q, Tensor k, Tensor v, Tensor indices, Tensor lengths"
    ", float scale, bool full, str backend) -> Tensor",
    _run_decode_selected,
    _fake_decode,
)
_RETRIEVE = register(
    "retrieve(Tensor q, Tensor k, Tensor? heads, SymInt selection_heads, SymInt[] first, SymInt[] start, SymInt sink, "
    "SymInt local, SymInt topk, float scale, bool with_mass, str reduce, str backend) -> (Tensor, Tensor, Tensor)",
    _run_retrieve,
    _fake_retrieve,
)
_DILATE = register(
    "dilate(Tensor order, Tensor first, Tensor start, Tensor best, Tensor critical, Tensor? limit, SymInt columns, SymInt sink, "
    "SymInt local, SymInt radius, SymInt? per_best, SymInt width, str backend) -> (Tensor, Tensor)",
    _run_dilate,
    _fake_dilate,
)
_CIS_STEP = register(
    "cis_step(Tensor q, Tensor k, Tensor(a!) indices, Tensor(b!) lengths, Tensor(c!) age, Tensor(d!) anchor, SymInt[] first, "
    "SymInt[] start, SymInt sink, SymInt local, SymInt[] critical, SymInt[] best, SymInt[]? limit, SymInt? per_best, "
    "SymInt radius, SymInt block_size, bool frozen, float tau, float scale, Tensor? axes, str backend) -> (Tensor, Tensor)",
    _run_cis_step,
    _fake_cis_step,
)
