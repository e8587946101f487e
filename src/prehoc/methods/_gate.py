"""The gate of CIS: what a step compares with the anchors, and which heads an anchor speaks for."""

from __future__ import annotations

import torch
from torch import Tensor

from prehoc.selection import Step

GATES = ("query", "key", "hidden")


def compared(gate: str, step: Step) -> Tensor:
    """Return the unit vectors that a gate compares at a step.

    Parameters
    ----------
    gate : {"query", "key", "hidden"}
        Queries, the newest keys as they lie in the cache, or the hidden state that enters the layer (PrHS, Table IX).
    step : Step
        The step.

    Returns
    -------
    Tensor
        float32 ``[B, A, W]``: A = H queries, Hkv keys, or one hidden state a row. A vector of length zero gives NaN: it never
        shares.

    Raises
    ------
    ValueError
        When the step has no hidden state to compare.
    """
    if gate == "query":
        found = step.q.float()
    elif gate == "key":
        found = step.k[:, :, -1].float()
    elif step.hidden is None:
        raise ValueError(
            "gate=hidden compares the hidden states that enter a layer, and recorded or drawn queries and keys have none: run "
            "the whole model, for example with prehoc trace, or take gate=query or gate=key"
        )
    else:
        found = step.hidden[:, None].float()
    unit: Tensor = found / torch.linalg.vector_norm(found, dim=-1, keepdim=True)
    return unit


def cosines(unit: Tensor, anchor: Tensor, heads: int) -> Tensor:
    """Return float32 ``[B, heads]``: the least cosine of each head's vectors (``[B, A, W]``) with their anchors (NaN: none)."""
    each = (unit * anchor).sum(-1)  # [B, A]
    b, vectors = each.shape
    if vectors < heads:
        each = each.repeat_interleave(heads // vectors, 1)
    least: Tensor = each.view(b, heads, -1).amin(-1).clamp_(max=1.0)
    return least


def keep(anchor: Tensor, unit: Tensor, fresh: Tensor) -> None:
    """Make `unit` the anchors ``[B, A, W]``, in place, of the heads that `fresh` (bool ``[B, Hs]``) names.

    Heads that share a vector have retrieved at the same steps ever since: one of them speaks for all.
    """
    b, vectors, _ = anchor.shape
    if vectors < fresh.shape[1]:
        fresh = fresh.view(b, vectors, -1)[..., 0]
    mask = fresh.repeat_interleave(vectors // fresh.shape[1], 1)
    anchor.copy_(torch.where(mask[..., None], unit, anchor))
