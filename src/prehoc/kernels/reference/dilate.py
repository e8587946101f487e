"""Dilation: the best keys with their neighbours, between sinks and local keys, as one ascending list a head."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from prehoc.kernels import host

_FAR = torch.iinfo(torch.int32).max  # later than any number of critical keys


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
    """Return sinks, the best keys with the neighbours of the very best, and the local keys, as one ascending list a head.

    Source: the PrHS paper's dilation; neighbours outside the middle are dropped, not shifted (design decision 3).

    Parameters
    ----------
    order : Tensor
        int64 ``[R, k]`` columns of the middle, best first, -1 padding.
    first, start : Tensor
        int64 ``[R, 1]``, the row's first real column and the first column of its middle.
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
    r, k = order.shape
    device = order.device
    rank = torch.arange(1, k + 1, dtype=torch.int32, device=device).expand(r, k)
    # entry: the number of critical keys from which on a column belongs; the spare column n takes what belongs nowhere
    entry = torch.full((r, columns + 1), _FAR, dtype=torch.int32, device=device)
    entry.scatter_(1, torch.where(order >= 0, order, columns), rank)
    dilated = min(best, k) if isinstance(best, int) else k
    if radius and dilated:
        source, near_rank = order[:, :dilated], rank[:, :dilated] * (per_best or 1)
        eligible = source >= 0
        if not isinstance(best, int):
            eligible &= rank[:, :dilated] <= best
        for offset in (o for o in range(-radius, radius + 1) if o):
            near = source + offset
            inside = eligible & (near >= start) & (near < columns - local)
            entry.scatter_reduce_(1, torch.where(inside, near, columns), near_rank, "amin")
    entry[:, columns - local :] = 0
    entry[:, columns] = _FAR
    if sink:
        entry.scatter_(1, first + torch.arange(sink, device=device), 0)
    allowed = critical
    if limit is not None:  # the largest k' whose keys fit: count the columns that each k' brings in
        arrivals = torch.zeros((r, k + 2), dtype=torch.int64, device=device)
        arrivals.scatter_add_(1, entry.clamp(max=k + 1).long(), torch.ones_like(entry, dtype=torch.int64))
        fits = (arrivals.cumsum(1)[:, 1 : k + 1] <= limit).sum(1, keepdim=True)
        allowed = torch.minimum(fits, torch.as_tensor(critical, device=device))
    width = min(columns, sink + local + k + 2 * radius * dilated)
    return _pack(entry[:, :columns] <= allowed, width)


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
