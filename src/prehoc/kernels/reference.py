"""The torch backend: every operation in plain torch, on any device. Correct first, and the truth other backends meet.

Shapes: B batch rows, H query heads, Hkv KV heads, G = H / Hkv, Hs selection heads (Hkv or H), n cache columns, D head size.
K and V are views ``[B, Hkv, n, D]`` of the preallocated cache; nothing here repeats or copies a whole one.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_FAR = torch.iinfo(torch.int32).max  # sorts behind every column


@dataclasses.dataclass
class Retrieval:
    """The best keys of the middle for R heads.

    Parameters
    ----------
    order : Tensor
        int64 ``[R, k]`` cache columns, best first, ties by lower column; -1 where the middle is smaller.
    weights : Tensor or None
        float32 ``[R, G, k]`` attention weight of these keys for each query head of the group.
    base : Tensor or None
        float32 ``[R, G]`` attention weight of sinks and local keys together.
    """

    order: Tensor
    weights: Tensor | None = None
    base: Tensor | None = None


def host_may_look(device: torch.device) -> bool:
    """Return whether reading a tensor's values costs nothing: on an accelerator the decode path must never wait for it."""
    return device.type == "cpu"


def group_queries(q: Tensor, selection_heads: int, kv_heads: int) -> Tensor:
    """Return q ``[B, H, D]`` as ``[B, Hs, G', D]``: the queries that share a selection head."""
    b, h, d = q.shape
    if selection_heads not in (h, kv_heads):
        raise ValueError(f"{selection_heads} selection heads fit neither {h} query heads nor {kv_heads} KV heads")
    return q.view(b, selection_heads, h // selection_heads, d)


def _logits(q: Tensor, k: Tensor, heads: Tensor | None, per_row: int) -> Tensor:
    """Return q.k in float32 ``[R, G, m]`` for the chosen flat (row, head) pairs; q ``[B*Hs, G, D]``, k ``[B, Hkv, m, D]``."""
    kv = k.flatten(0, 1)  # [B*Hkv, m, D], still a view
    share = per_row // k.shape[1]  # 1 for kv_head, G for query_head
    if heads is None:
        if share > 1:
            return (q.view(kv.shape[0], share, -1).float() @ kv.float().mT).flatten(0, 1).unsqueeze(1)
        return q.float() @ kv.float().mT
    out = q.new_empty((heads.numel(), q.shape[1], k.shape[2]), dtype=torch.float32)
    for i, pair in enumerate(heads.tolist()):  # one matrix product a head: copies no key
        torch.mm(q[pair].float(), kv[pair // share].float().mT, out=out[i])
    return out


def ranked(score: Tensor, k: int) -> Tensor:
    """Return int64 ``[R, k]`` positions of the k largest of float32 ``[R, m]``, best first; equal bits: the lower index wins."""
    bits = (score + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    m = score.shape[-1]
    key = (ordered << 32) | torch.arange(m - 1, -1, -1, device=score.device)
    if not host_may_look(key.device):
        return torch.topk(key, k, dim=-1).indices
    best = np.partition(key.numpy(), m - k)[
        :, m - k :
    ]  # keys are unique, and numpy selects with SIMD where torch does not
    best.sort()
    return torch.from_numpy(m - 1 - (best[:, ::-1] & 0xFFFFFFFF))


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
    """Score the middle of each chosen head exactly and return its best keys.

    A key's score is the largest over the G query heads of (logit - LSE of that head over the sinks and every column from
    `start` on), or with ``reduce="mean"`` the logarithm of the weights' sum over the group. Source: design decision 1.

    Parameters
    ----------
    q : Tensor
        ``[B, H, D]``.
    k : Tensor
        ``[B, Hkv, n, D]``.
    heads : Tensor or None
        int64 ``[R]`` flat indices row * Hs + head; None: all, in order.
    selection_heads : int
        Hs.
    first, start : tuple of int
        Per row, the first real column and the first column of the middle (``start >= first + sink``).
    sink, local : int
        Sizes of what lies before and behind the middle.
    topk : int
        Keys to return per head.
    scale : float
        Factor on the logits.
    with_mass : bool
        Also return `weights` and `base`.
    reduce : {"max", "mean"}
        How the query heads of a group are merged.

    Returns
    -------
    Retrieval
    """
    n, (low, high) = k.shape[2], (min(start), max(start))
    queries = group_queries(q, selection_heads, k.shape[1]).flatten(0, 1).float() * scale  # [B*Hs, G, D]
    group = queries.shape[1]
    tail = _logits(queries, k[:, :, low:], heads, selection_heads)  # [R, G, n - low]
    pairs = torch.arange(len(start) * selection_heads, device=q.device) if heads is None else heads
    row = pairs // selection_heads  # [R]
    columns = torch.arange(low, n, device=q.device)
    if high > low:  # ragged rows: hide what lies before a row's own middle
        begin = torch.tensor(start, device=q.device)[row]
        tail.masked_fill_((columns < begin[:, None])[:, None], -torch.inf)
    middle = tail[..., : n - low - local]
    weights = base = None
    if group > 1 or with_mass:
        lse = torch.logsumexp(tail, -1)  # [R, G]
        if sink:
            sinks = torch.logsumexp(_sink_logits(queries, k, heads, selection_heads, first, sink), -1)
            lse = torch.logaddexp(lse, sinks)
        relative = middle - lse[..., None]
        score = relative.amax(1) if reduce == "max" else torch.logsumexp(relative, 1)  # [R, m]
    else:
        score = middle[:, 0]
    position = ranked(score, min(topk, score.shape[1]))
    if with_mass:
        weights = torch.exp(middle.gather(2, position[:, None].expand(-1, group, -1)) - lse[..., None])
        base = torch.exp(torch.logsumexp(tail[..., n - low - local :], -1) - lse)
        base = base + torch.exp(sinks - lse) if sink else base
    order = position + low
    if high > low:
        order = torch.where(order >= begin[:, None], order, -1)
    return Retrieval(order, weights, base)


def _sink_logits(q: Tensor, k: Tensor, heads: Tensor | None, per_row: int, first: tuple[int, ...], sink: int) -> Tensor:
    if len(set(first)) == 1:
        return _logits(q, k[:, :, first[0] : first[0] + sink], heads, per_row)
    last = k.shape[2] - sink  # a row shorter than its sinks has no middle: any columns do
    return _logits(q, torch.stack([k[b, :, min(f, last) :][:, :sink] for b, f in enumerate(first)]), heads, per_row)


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
    if host_may_look(keep.device):
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


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """Return ``[B, Hs, K, D]``: rows of the cache view ``[B, Hkv, n, D]`` at int ``[B, Hs, K]`` (negative: column 0)."""
    b, hs, count = indices.shape
    hkv, n, d = x.shape[1:]
    heads = torch.arange(hs, device=x.device) // (hs // hkv)  # [Hs]
    per_row, per_head = x.stride(0) // d, x.stride(1) // d
    base = (torch.arange(b, device=x.device)[:, None] * per_row + heads * per_head)[..., None]  # [B, Hs, 1]
    flat = x.as_strided((per_row * (b - 1) + per_head * (hkv - 1) + n, d), (d, 1))  # the cache as one list of rows
    return flat.index_select(0, (base + indices.clamp(min=0)).view(-1)).view(b, hs, count, d)


def decode_selected(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, lengths: Tensor, scale: float, full: bool = False
) -> Tensor:
    """Attend to the selected keys only.

    Parameters
    ----------
    q : Tensor
        ``[B, H, D]``.
    k, v : Tensor
        ``[B, Hkv, n, D]``.
    indices : Tensor
        int32 ``[B, Hs, K]``, -1 padding.
    lengths : Tensor
        int32 ``[B, Hs]``.
    scale : float
        Factor on the logits.
    full : bool
        No padding in `indices`.

    Returns
    -------
    Tensor
        ``[B, H, D]`` in the dtype of q.
    """
    return decode_compact(q, gather_rows(k, indices), gather_rows(v, indices), lengths, scale, full)


def decode_compact(
    q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float, full: bool = False
) -> Tensor:
    """Attend to keys that were gathered already.

    Parameters
    ----------
    q : Tensor
        ``[B, H, D]``.
    keys, values : Tensor
        ``[B, Hs, K, D]``; behind a head's length they are finite and ignored.
    lengths : Tensor
        int32 ``[B, Hs]``.
    scale : float
        Factor on the logits.
    full : bool
        Every length is K.

    Returns
    -------
    Tensor
        ``[B, H, D]`` in the dtype of q.
    """
    b, hs, count, _ = keys.shape
    mask = None if full else (torch.arange(count, device=q.device) < lengths[..., None])[:, :, None]
    grouped = q.view(b, hs, q.shape[1] // hs, -1)  # [B, Hs, G, D]
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(b, q.shape[1], values.shape[-1])


def decode_dense(
    q: Tensor, k: Tensor, v: Tensor, first: tuple[int, ...], sink: int, start: tuple[int, ...], scale: float
) -> Tensor:
    """Attend to each row's first `sink` real keys and to every column from `start` on (``start <= first``: all of them).

    Parameters
    ----------
    q : Tensor
        ``[B, H, D]``.
    k, v : Tensor
        ``[B, Hkv, n, D]``.
    first, start : tuple of int
        Per row, the first real column and the first visible column behind the sinks.
    sink : int
        Sink keys, visible whatever `start` says.
    scale : float
        Factor on the logits.

    Returns
    -------
    Tensor
        ``[B, H, D]`` in the dtype of q.
    """
    grouped = group_queries(q, k.shape[1], k.shape[1])  # [B, Hkv, G, D]
    begin = tuple(f if s <= f + sink else s for f, s in zip(first, start, strict=True))
    if len(set(begin)) == len(set(first)) == 1:
        out = _range_attention(grouped, k, v, first[0], sink, begin[0], scale)
    elif begin == first:  # padding only
        columns = torch.arange(min(first), k.shape[2], device=q.device)
        mask = columns >= torch.tensor(first, device=q.device).view(-1, 1, 1, 1)
        out = F.scaled_dot_product_attention(
            grouped, k[:, :, min(first) :], v[:, :, min(first) :], attn_mask=mask, scale=scale
        )
    else:
        rows = (slice(b, b + 1) for b in range(len(first)))
        out = torch.cat(
            [_range_attention(grouped[b], k[b], v[b], first[b.start], sink, begin[b.start], scale) for b in rows]
        )
    return out.reshape(q.shape[0], q.shape[1], v.shape[-1])


def _range_attention(q: Tensor, k: Tensor, v: Tensor, first: int, sink: int, begin: int, scale: float) -> Tensor:
    if begin == first or not sink:
        return F.scaled_dot_product_attention(q, k[:, :, begin:], v[:, :, begin:], scale=scale)
    ks, vs, kt, vt = k[:, :, first : first + sink], v[:, :, first : first + sink], k[:, :, begin:], v[:, :, begin:]
    if q.dtype == torch.float32:  # two ranges, one softmax, no copy of the long one
        weights = torch.softmax(torch.cat([q @ ks.mT, q @ kt.mT], -1) * scale, -1)
        return weights[..., :sink] @ vs + weights[..., sink:] @ vt
    return F.scaled_dot_product_attention(q, torch.cat([ks, kt], 2), torch.cat([vs, vt], 2), scale=scale)
