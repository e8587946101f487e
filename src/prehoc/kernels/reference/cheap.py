"""Cheap retrieval: an int8 copy of the keys is scored first, and only the best of it exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from prehoc.kernels.host import group_queries
from prehoc.kernels.reference.decode import gather_rows
from prehoc.kernels.reference.retrieve import Retrieval, ranked


def compact(k: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys rounded to eight bits with one scale a key; columns are independent, so new ones can be appended.

    Parameters
    ----------
    k : Tensor
        ``[B, Hkv, n, D]``.

    Returns
    -------
    codes : Tensor
        int8 ``[B, Hkv, n, D]``.
    scales : Tensor
        float32 ``[B, Hkv, n]``; a key is about ``codes * scales``.
    """
    scales = k.abs().amax(-1).float() / 127
    codes = torch.round(k.float() / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None])
    return codes.to(torch.int8), scales


def retrieve_compact(
    q: Tensor,
    k: Tensor,
    codes: Tensor,
    scales: Tensor,
    heads: Tensor | None,
    selection_heads: int,
    first: tuple[int, ...],
    start: tuple[int, ...],
    sink: int,
    local: int,
    topk: int,
    scale: float,
    rerank: int = 2,
    reduce: str = "max",
) -> Retrieval:
    """Return the best keys of each head's middle among the ``rerank * topk`` best by compact score, ranked exactly.

    The log-sum-exp that puts the heads of a group on one scale comes from the compact scores (and exact sinks).

    Parameters
    ----------
    codes, scales : Tensor
        What `compact` returned for k.
    rerank : int
        Keys to score exactly for each one that is returned; 0: the compact scores rank them.
    q, k, heads, selection_heads, first, start, sink, local, topk, scale, reduce
        As in `retrieve`.

    Returns
    -------
    Retrieval
        ``order`` only.
    """
    b, hs, n = q.shape[0], selection_heads, k.shape[2]
    queries = group_queries(q, hs, k.shape[1]).float() * scale  # [B, Hs, G, D]
    topk = min(topk, max(n - min(start) - local, 0))
    chosen = list(range(b * hs)) if heads is None else heads.tolist()
    order = torch.full((len(chosen), topk), -1, dtype=torch.int64, device=q.device)
    for i, pair in enumerate(chosen):
        row, head = divmod(pair, hs)
        kv, begin, query = head * k.shape[1] // hs, start[row], queries[row, head]
        if begin >= n - local:
            continue
        logits = query @ codes[row, kv, begin:].float().mT * scales[row, kv, begin:]  # [G, n - begin]
        lse = logits.new_zeros(1, 1)
        if query.shape[0] > 1:
            sinks = query @ k[row, kv, first[row] : first[row] + sink].float().mT
            lse = torch.logsumexp(torch.cat([sinks, logits], 1), 1, keepdim=True)  # [G, 1]
        score = _merged(logits[:, : n - local - begin] - lse, reduce)
        best = ranked(score[None], min((rerank or 1) * topk, score.shape[0]))[0] + begin
        if rerank == 0:
            order[i, : best.shape[0]] = best
            continue
        candidates = best.sort().values
        exact = query @ gather_rows(k[row : row + 1, kv : kv + 1], candidates.view(1, 1, -1))[0, 0].float().mT
        best = ranked(_merged(exact - lse, reduce)[None], min(topk, candidates.shape[0]))[0]
        order[i, : best.shape[0]] = candidates[best]
    return Retrieval(order)


def _merged(relative: Tensor, reduce: str) -> Tensor:
    return relative.amax(0) if reduce == "max" else torch.logsumexp(relative, 0)
