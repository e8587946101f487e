"""Dilation: the best keys with their neighbours, between sinks and local keys, as one ascending list a head."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from prehoc.kernels import host

_FAR = torch.iinfo(torch.int32).max  # later than any number of critical keys


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
) -> tuple[Tensor, Tensor]:
    """Return sinks, the best keys with the neighbours of the very best, and the local keys, as one ascending list a head.

    Source: the PrHS paper's dilation; neighbours outside the middle are dropped, not shifted (design decision 3).

    Parameters
    ----------
    order : Tensor
        int64 ``[R, k]`` columns of the middle, best first, -1 padding.
    first, start : Tensor or int
        The row's first real column and the first column of its middle (int64 ``[R, 1]`` or one number).
    columns : int
        n, columns of the cache; the middle ends at ``n - local``.
    sink, local, radius : int
        Sizes; `radius` is r.
    best : Tensor or int
        m, how many of the best keys are dilated (``[R, 1]`` or one number).
    critical : Tensor or int
        How many of `order` count (``[R, 1]`` or one number).
    limit : Tensor or int, optional
        CIS*: the largest number of keys (sinks and local included) that the result may have (``[R, 1]`` or one number): the
        number of critical keys is lowered until it fits.
    per_best : int, optional
        With `limit`: m = (critical keys) // per_best; None: m = min(best, critical keys).

    Returns
    -------
    indices : Tensor
        int32 ``[R, K]``, ascending, unique, -1 padding at the end.
    lengths : Tensor
        int32 ``[R]``.
    """
    k = order.shape[1]
    dilated = min(best, k) if isinstance(best, int) else k
    width = min(columns, sink + local + k + 2 * radius * dilated)
    if limit is not None:
        entry = _entries(order, first, start, columns, sink, local, radius, best, per_best)
        return _pack(entry <= _fitting(entry, k, limit, critical), width)
    rank = torch.arange(1, k + 1, device=order.device)
    chosen = order >= 0
    if not isinstance(critical, int) or critical < k:
        chosen = chosen & (rank <= critical)
    keep = torch.zeros((order.shape[0], columns + 1), dtype=torch.bool, device=order.device)
    keep.scatter_(1, torch.where(chosen, order, columns), True)  # the spare column n takes what belongs nowhere
    for near, inside, _ in _neighbours(order, rank, start, columns - local, radius, best):
        keep.scatter_(1, torch.where(inside & chosen[:, : near.shape[1]], near, columns), True)
    keep[:, columns - local :] = True
    _mark_sinks(keep, first, sink, True)
    return _pack(keep[:, :columns], width)


def _neighbours(
    order: Tensor, rank: Tensor, start: Tensor | int, end: int, radius: int, best: Tensor | int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield, for each offset, the columns beside the best m keys, whether they lie in the middle, and the ranks of these keys."""
    many = min(best, order.shape[1]) if isinstance(best, int) else order.shape[1]
    source, near_rank = order[:, :many], rank[:many]
    eligible = source >= 0
    if not isinstance(best, int):
        eligible &= near_rank <= best
    for offset in (o for o in range(-radius, radius + 1) if o and many):
        near = source + offset
        yield near, eligible & (near >= start) & (near < end), near_rank


def _entries(
    order: Tensor,
    first: Tensor | int,
    start: Tensor | int,
    columns: int,
    sink: int,
    local: int,
    radius: int,
    best: Tensor | int,
    per_best: int | None,
) -> Tensor:
    """Return int32 ``[R, n]``: the number of critical keys from which on a column belongs to the result."""
    r, k = order.shape
    rank = torch.arange(1, k + 1, dtype=torch.int32, device=order.device)
    entry = torch.full((r, columns + 1), _FAR, dtype=torch.int32, device=order.device)
    entry.scatter_(1, torch.where(order >= 0, order, columns), rank.expand(r, k))
    for near, inside, near_rank in _neighbours(order, rank, start, columns - local, radius, best):
        arrival = (near_rank * (per_best or 1)).expand_as(near)
        entry.scatter_reduce_(1, torch.where(inside, near, columns), arrival, "amin")
    entry[:, columns - local :] = 0
    _mark_sinks(entry, first, sink, 0)
    return entry[:, :columns]


def _fitting(entry: Tensor, k: int, limit: Tensor | int, critical: Tensor | int) -> Tensor:
    """Return int64 ``[R, 1]``: the most critical keys, up to `critical`, whose columns number at most `limit`."""
    arrivals = torch.zeros((entry.shape[0], k + 2), dtype=torch.int64, device=entry.device)
    arrivals.scatter_add_(1, entry.clamp(max=k + 1).long(), torch.ones_like(entry, dtype=torch.int64))
    fits = (arrivals.cumsum(1)[:, 1 : k + 1] <= limit).sum(1, keepdim=True)
    return torch.minimum(fits, torch.as_tensor(critical, device=entry.device))


def _mark_sinks(columns: Tensor, first: Tensor | int, sink: int, value: int | bool) -> None:
    if isinstance(first, int):
        columns[:, first : first + sink] = value
    elif sink:
        columns.scatter_(1, first + torch.arange(sink, device=columns.device), value)


def _pack(keep: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the columns kept in bool ``[R, n]`` as ascending lists int32 ``[R, width]``, -1 behind, and their lengths."""
    if host.may_look(keep.device):
        found = [np.flatnonzero(row) for row in keep.numpy()]
        lengths = np.array([len(row) for row in found], dtype=np.int32)
        lists = np.full((len(found), max(lengths)), -1, dtype=np.int32)
        for row, columns in zip(lists, found, strict=True):
            row[: len(columns)] = columns
        return torch.from_numpy(lists), torch.from_numpy(lengths)
    place = keep.cumsum(1, dtype=torch.int32)
    out = place.new_full((keep.shape[0], width + 1), -1)
    numbers = torch.arange(keep.shape[1], dtype=torch.int32, device=keep.device).expand_as(place)
    out.scatter_(1, torch.where(keep, place - 1, width).long(), numbers)
    return out[:, :width], place[:, -1]
