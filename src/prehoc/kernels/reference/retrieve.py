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
    if not host.may_look(key.device):
        return torch.topk(key, k, dim=-1).indices
    # keys are unique, so the order is the only one there is, and numpy selects with SIMD where torch does not
    best = np.partition(key.numpy(), m - k)[:, m - k :]
    best.sort()
    return torch.from_numpy(m - 1 - (best[:, ::-1] & 0xFFFFFFFF))
