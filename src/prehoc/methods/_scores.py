"""What methods that make their own scores share: grouped queries, padding, one score a selection head."""

from __future__ import annotations

import torch
from torch import Tensor

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
