"""What CIS and the oracle share: where the middle lies, and one exact retrieval turned into lists of keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prehoc import kernels
from prehoc.config import Budget
from prehoc.kernels import host
from prehoc.kernels.reference import Retrieval, retrieve_compact
from prehoc.selection import Selection, Step

DILATE_SHARE = 3  # m = k // 3, the paper's n_den


@dataclasses.dataclass(frozen=True)
class Middle:
    """The middle of every row at one step.

    Parameters
    ----------
    heads : int
        Hs, selection heads.
    local : int
        Keys behind the middle.
    start : tuple of int
        Per row, the first column of the middle.
    scored : tuple of int
        Per row, the keys whose K a retrieval reads: sinks, middle and local keys.
    critical : tuple of int
        Per row, the critical keys that the budget allows.
    counted : tuple of bool
        Per row, whether there is something to choose.
    """

    heads: int
    local: int
    start: tuple[int, ...]
    scored: tuple[int, ...]
    critical: tuple[int, ...]
    counted: tuple[bool, ...]

    @classmethod
    def of(cls, step: Step, budget: Budget, granularity: str) -> Middle:
        """Return the middle for a step: ``[max(sink, masked), t - local)`` in each row's tokens (design decision 3)."""
        start, scored, critical, counted = [], [], [], []
        for pad, prompt, masked in zip(step.rows.pad, step.rows.prompt, step.masked, strict=True):
            begin = pad + max(budget.sink, masked)
            keys = max(step.columns - budget.local - begin, 0)
            limit = budget.critical_for(prompt)
            start.append(begin)
            scored.append(budget.sink + step.columns - begin)
            critical.append(keys if limit is None else min(limit, keys))
            counted.append(keys > (limit or 0))
        heads = step.k.shape[1] if granularity == "kv_head" else step.q.shape[1]
        return cls(heads, budget.local, tuple(start), tuple(scored), tuple(critical), tuple(counted))


def per_row(values: tuple[int, ...], row: Tensor) -> Tensor | int:
    """Return one number when all rows agree, else int64 ``[R, 1]`` for the rows in `row`."""
    return values[0] if len(set(values)) == 1 else torch.tensor(values, device=row.device)[row, None]


def retrieve_lists(
    step: Step,
    middle: Middle,
    chosen: Tensor | None,
    budget: Budget,
    dilate: int | None,
    radius: int,
    reserve: int | None = None,
    reduce: str = "max",
    codes: tuple[Tensor, Tensor] | None = None,
    rerank: int = 1,
) -> tuple[Tensor, Tensor]:
    """Retrieve for the chosen heads and return their lists: sinks, dilated set and local keys.

    Parameters
    ----------
    step : Step
        The step.
    middle : Middle
        Its middle; every chosen row must be counted.
    chosen : Tensor or None
        int64 ``[R]`` flat (row, head) pairs; None: all.
    budget : Budget
        Sizes.
    dilate, radius : int
        m (None: a third of the critical keys) and r.
    reserve : int, optional
        CIS*: pay the dilation, and this many keys of window growth, out of the budget.
    reduce : {"max", "mean"}
        How the query heads of a group are merged.
    codes : (Tensor, Tensor), optional
        A compact copy of the keys (`kernels.reference.compact`): it is scored first, and only the best of it exactly.
    rerank : int
        With `codes`: keys scored exactly for each critical key.

    Returns
    -------
    indices, lengths : Tensor
        int32 ``[R, K]`` and ``[R]``.
    """
    device = step.q.device
    ops = kernels.get(step.backend, device)
    place: tuple[Any, ...] = (
        chosen,
        middle.heads,
        step.rows.pad,
        middle.start,
        budget.sink,
        budget.local,
        max(middle.critical),
        step.scale,
    )
    if codes is None:
        found = ops.retrieve(step.q, step.k, *place, with_mass=budget.mass is not None, reduce=reduce)
    else:
        cheap: Callable[..., Retrieval] = getattr(ops, "retrieve_compact", retrieve_compact)
        found = cheap(step.q, step.k, *codes, *place, rerank=rerank, reduce=reduce)
    pairs = torch.arange(len(middle.start) * middle.heads, device=device) if chosen is None else chosen
    row = pairs // middle.heads
    critical = per_row(middle.critical, row)
    if budget.mass is not None:
        critical = torch.minimum(_keys_for_mass(found, budget.mass), torch.as_tensor(critical, device=device))
    limit = None
    if reserve is not None:  # of the stated total, whatever the mass asks for; sinks and local keys always fit
        always = budget.sink + budget.local
        limit = per_row(tuple(max(keys - reserve, 0) + always for keys in middle.critical), row)
    lists: tuple[Tensor, Tensor] = ops.dilate(
        found.order,
        per_row(step.rows.pad, row),
        per_row(middle.start, row),
        step.columns,
        budget.sink,
        budget.local,
        radius,
        critical // DILATE_SHARE if dilate is None else dilate,
        critical,
        limit,
        DILATE_SHARE if reserve is not None and dilate is None else None,
    )
    return lists


def _keys_for_mass(found: Retrieval, mass: float) -> Tensor:
    """Return int64 ``[R, 1]``: the fewest best keys with which every query head of the group retains `mass`."""
    assert found.weights is not None and found.base is not None
    retained = found.base[..., None] + found.weights.cumsum(-1)  # [R, G, k]
    short = (retained < mass).any(1)  # [R, k], monotone: True while some head of the group lacks mass
    enough = (found.base < mass).any(1, keepdim=True)  # [R, 1], False: sinks and local keys alone suffice
    return (short.sum(1, keepdim=True) + 1).clamp(max=short.shape[1]) * enough


def cover(indices: Tensor, lengths: Tensor, step: Step, middle: Middle, sink: int) -> tuple[Tensor, Tensor]:
    """Return the lists with every visible key in the rows that the budget covers.

    Parameters
    ----------
    indices, lengths : Tensor
        int32 ``[B, Hs, K]`` and ``[B, Hs]``; rows that are not counted hold nothing of value.
    step : Step
        The step.
    middle : Middle
        Its middle.
    sink : int
        Sink tokens.
    """
    indices, lengths = indices.clone(), lengths.clone()
    for b, (pad, begin, counted) in enumerate(zip(step.rows.pad, middle.start, middle.counted, strict=True)):
        if counted:
            continue
        columns = torch.arange(pad, step.columns, device=indices.device, dtype=torch.int32)
        # a depth window may hide what lies between the sinks and the middle; the local keys never
        columns = columns[(columns < pad + sink) | (columns >= min(begin, step.columns - middle.local))]
        if columns.numel() > indices.shape[2]:
            indices = F.pad(indices, (0, columns.numel() - indices.shape[2]), value=-1)
        indices[b] = -1
        indices[b, :, : columns.numel()] = columns
        lengths[b] = columns.numel()
    return indices, lengths


def as_selection(indices: Tensor, lengths: Tensor) -> Selection:
    """Return the lists as a selection, trimmed to the longest where the host may look."""
    if not host.may_look(lengths.device):
        return Selection(indices, lengths)
    longest = int(lengths.max())
    return Selection(indices[..., :longest], lengths, full=int(lengths.min()) == longest)
