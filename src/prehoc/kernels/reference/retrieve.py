"""Exact retrieval: score the middle of a head in full and return its best keys."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from prehoc.kernels import host
from prehoc.kernels.host import group_queries


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
    lead = sink if low == high == min(first) + sink == max(first) + sink else 0  # one product scores sinks and middle
    tail = _logits(queries, k[:, :, low - lead :], heads, selection_heads)  # [R, G, lead + n - low]
    if high > low:  # ragged rows: hide what lies before a row's own middle
        pairs = torch.arange(len(start) * selection_heads, device=q.device) if heads is None else heads
        begin = torch.tensor(start, device=q.device)[pairs // selection_heads]  # [R]
        columns = torch.arange(low, n, device=q.device)
        tail.masked_fill_((columns < begin[:, None])[:, None], -torch.inf)
    end = tail.shape[2] - local
    middle = tail[..., lead:end]
    weights = base = None
    if group > 1 or with_mass:
        lse = torch.logsumexp(tail, -1)  # [R, G]
        if sink and not lead:
            sinks = torch.logsumexp(_sink_logits(queries, k, heads, selection_heads, first, sink), -1)
            lse = torch.logaddexp(lse, sinks)
        relative = middle - lse[..., None]
        score = relative.amax(1) if reduce == "max" else torch.logsumexp(relative, 1)  # [R, m]
    else:
        score = middle[:, 0]
    position = ranked(score, min(topk, score.shape[1]))
    if with_mass:
        weights = torch.exp(middle.gather(2, position[:, None].expand(-1, group, -1)) - lse[..., None])
        base = torch.exp(torch.logsumexp(tail[..., end:], -1) - lse)
        if sink:
            base = base + torch.exp((torch.logsumexp(tail[..., :lead], -1) if lead else sinks) - lse)
    order = position + low
    if high > low:
        order = torch.where(order >= begin[:, None], order, -1)
    return Retrieval(order, weights, base)


def _sink_logits(q: Tensor, k: Tensor, heads: Tensor | None, per_row: int, first: tuple[int, ...], sink: int) -> Tensor:
    if len(set(first)) == 1:
        return _logits(q, k[:, :, first[0] : first[0] + sink], heads, per_row)
    last = k.shape[2] - sink  # a row shorter than its sinks has no middle: any columns do
    return _logits(q, torch.stack([k[b, :, min(f, last) :][:, :sink] for b, f in enumerate(first)]), heads, per_row)


def _logits(q: Tensor, k: Tensor, heads: Tensor | None, per_row: int) -> Tensor:
    """Return q.k in float32 ``[R, G, m]`` for the chosen flat (row, head) pairs; q ``[B*Hs, G, D]``, k ``[B, Hkv, m, D]``."""
    kv = k.flatten(0, 1)  # [B*Hkv, m, D], still a view
    share = per_row // k.shape[1]  # 1 for kv_head, G for query_head
    if heads is None:
        together = q.view(kv.shape[0], share * q.shape[1], -1)
        found = kv.float() @ together.mT  # [B*Hkv, m, share * G]: twice as fast as the product the other way round
        return found.mT.reshape(q.shape[0], q.shape[1], -1)
    out = q.new_empty((heads.numel(), k.shape[2], q.shape[1]))
    for i, pair in enumerate(heads.tolist()):  # one matrix product a head: copies no key
        torch.mm(kv[pair // share].float(), q[pair].mT, out=out[i])
    return out.mT.contiguous()


def ranked(score: Tensor, k: int) -> Tensor:
    """Return int64 ``[R, k]`` positions of the k largest of float32 ``[R, m]``, best first; equal bits: the lower index wins."""
    score = score + 0.0  # -0.0 becomes 0.0
    m = score.shape[-1]
    if not host.may_look(score.device):
        bits = score.view(torch.int32)
        ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
        key = (ordered << 32) | torch.arange(m - 1, -1, -1, device=score.device)
        return torch.topk(key, k, dim=-1).indices
    out = np.empty((score.shape[0], k), dtype=np.int64)
    for row, best in zip(score.numpy(), out, strict=True):  # numpy selects and sorts with SIMD where torch does not
        found = np.flatnonzero(row >= np.partition(row, m - k)[m - k]) if k else np.empty(0, dtype=np.int64)
        bits = row[found].view(np.int32)
        key = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int64) << 32 | (m - 1 - found)
        key.sort()
        best[:] = m - 1 - (key[::-1][:k] & 0xFFFFFFFF)
    return torch.from_numpy(out)
