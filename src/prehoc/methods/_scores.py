"""What methods with approximate scores share: one score a selection head, and the best keys of a middle as lists."""

from __future__ import annotations

import torch
from torch import Tensor

from prehoc.kernels.reference import ranked
from prehoc.methods._retrieval import Middle
from prehoc.selection import Step


def grouped_queries(step: Step) -> Tensor:
    """Return the scaled queries ``[B, Hkv, G, D]`` in float32, or float64 for a float64 model."""
    b, h, d = step.q.shape
    exact = torch.promote_types(step.q.dtype, torch.float32)
    return step.q.view(b, step.k.shape[1], -1, d).to(exact) * step.scale


def per_head(logits: Tensor, granularity: str) -> Tensor:
    """Return one score a selection head and column.

    A group's query heads are merged as in an exact retrieval: each votes with its own share of what is visible.

    Parameters
    ----------
    logits : Tensor
        ``[B, Hkv, G, m]``, -inf where a column is not visible.
    granularity : {"kv_head", "query_head"}
        What a selection head is.

    Returns
    -------
    Tensor
        ``[B, Hs, m]``.
    """
    if granularity == "query_head":
        return logits.flatten(1, 2)
    if logits.shape[2] == 1:
        return logits[:, :, 0]
    return (logits - torch.logsumexp(logits, -1, keepdim=True)).amax(2)


def hide_padding(logits: Tensor, pad: tuple[int, ...]) -> Tensor:
    """Return ``[B, ..., n]`` with -inf in each row's first `pad` columns."""
    if not any(pad):
        return logits
    columns = torch.arange(logits.shape[-1], device=logits.device)
    begin = torch.tensor(pad, device=logits.device).view(-1, *(1,) * (logits.dim() - 1))
    return logits.masked_fill(columns < begin, -torch.inf)


def best_of_middle(score: Tensor, step: Step, middle: Middle, sink: int) -> tuple[Tensor, Tensor]:
    """Return sinks, the best keys of the middle and the local keys as ascending lists.

    Parameters
    ----------
    score : Tensor
        ``[B, Hs, n]``.
    step : Step
        The step.
    middle : Middle
        Its middle; rows that are not counted get lists of no value (`cover` replaces them).
    sink : int
        Sink tokens.

    Returns
    -------
    indices, lengths : Tensor
        int32 ``[B, Hs, K]`` and ``[B, Hs]``; equal scores: the lower column wins.
    """
    b, hs, n = score.shape
    device, low = score.device, min(middle.start)
    inside = score[..., low : n - middle.local].float()
    if len(set(middle.start)) > 1:
        inside = hide_padding(inside, tuple(start - low for start in middle.start))
    most = max(k for k, counted in zip(middle.critical, middle.counted, strict=True) if counted)
    best = ranked(inside.flatten(0, 1), most).view(b, hs, most) + low
    if len(set(middle.critical)) > 1:
        allowed = torch.tensor(middle.critical, device=device).view(-1, 1, 1)
        best = torch.where(torch.arange(most, device=device) < allowed, best, n)  # n: nothing, sorts to the end
    first = torch.tensor(step.rows.pad, device=device).view(-1, 1, 1) + torch.arange(sink, device=device)
    last = torch.arange(n - middle.local, n, device=device)
    parts = [first.expand(b, hs, -1), best, last.expand(b, hs, -1)]
    indices = torch.cat(parts, -1).sort(-1).values
    lengths = (best < n).sum(-1) + sink + middle.local
    return torch.where(indices < n, indices, -1).to(torch.int32), lengths.to(torch.int32)
