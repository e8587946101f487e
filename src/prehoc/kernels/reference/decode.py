"""Attention of one query a head: over everything, over two ranges, over selected keys."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prehoc.kernels.host import group_queries


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    lengths: Tensor,
    scale: float,
    full: bool = False,
    with_lse: bool = False,
) -> Any:
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
    with_lse : bool
        Also return the logarithm of each head's sum of exponentials, float32 ``[B, H]``, with which partial results merge.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        ``[B, H, D]`` in the dtype of q.
    """
    keys, values = gather_rows(k, indices), gather_rows(v, indices)
    if with_lse:
        seen = torch.arange(indices.shape[2], device=q.device) < lengths[..., None]  # [B, Hs, K]
        return _softmax_with_lse(group_queries(q, indices.shape[1], k.shape[1]), keys, values, seen, scale)
    return decode_compact(q, keys, values, lengths, scale, full)


def _softmax_with_lse(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return out ``[B, H, D]`` and float32 LSE ``[B, H]`` of q ``[B, Hs, G, D]`` over keys ``[B, Hs, K, D]`` where `seen`."""
    logits = (q.float() @ k.float().mT * scale).masked_fill(~seen[:, :, None], -torch.inf)
    lse = torch.logsumexp(logits, -1)
    values = v.float().masked_fill(~seen[..., None], 0)
    return (torch.exp(logits - lse[..., None]) @ values).to(q.dtype).flatten(1, 2), lse.flatten(1)


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: tuple[int, ...],
    sink: int,
    start: tuple[int, ...],
    scale: float,
    with_lse: bool = False,
) -> Any:
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
    with_lse : bool
        As in `decode_selected`.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        ``[B, H, D]`` in the dtype of q.
    """
    grouped = group_queries(q, k.shape[1], k.shape[1])  # [B, Hkv, G, D]
    if with_lse:
        at, rows = torch.arange(k.shape[2], device=q.device), torch.tensor([first, start], device=q.device)[..., None]
        seen = (at >= rows[0]) & ((at < rows[0] + sink) | (at >= rows[1]))  # [B, n]
        return _softmax_with_lse(grouped, k, v, seen[:, None].expand(-1, k.shape[1], -1), scale)
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
        each = (slice(b, b + 1) for b in range(len(first)))
        out = torch.cat(
            [_range_attention(grouped[b], k[b], v[b], first[b.start], sink, begin[b.start], scale) for b in each]
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
