"""What the host may do in the decode path, and the one view of queries that every operation shares."""

from __future__ import annotations

import torch
from torch import Tensor


def may_look(device: torch.device) -> bool:
    """Return whether reading a tensor's values costs nothing: on an accelerator the decode path must never wait for it."""
    return device.type == "cpu"


def group_queries(q: Tensor, selection_heads: int, kv_heads: int) -> Tensor:
    """Return q ``[B, H, D]`` as ``[B, Hs, G', D]``: the queries that share a selection head."""
    b, h, d = q.shape
    if selection_heads not in (h, kv_heads):
        raise ValueError(f"{selection_heads} selection heads fit neither {h} query heads nor {kv_heads} KV heads")
    return q.view(b, selection_heads, h // selection_heads, d)
