"""The sets that CIS keeps: one list of keys a head, its length, its age in steps, and the anchors of the gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from prehoc.selection import State


def reserve(state: State, anchors: tuple[int, ...], device: torch.device, heads: int, width: int) -> None:
    """Make room for sets of `width` keys for every head, and for `anchors` of what the gate compares: B, A, W.

    What is new belongs to no block.
    """
    indices: Tensor | None = state.get("indices")
    if indices is None:
        b = anchors[0]
        state["indices"] = torch.full((b, heads, width), -1, dtype=torch.int32, device=device)
        state["lengths"] = torch.zeros((b, heads), dtype=torch.int32, device=device)
        state["age"] = torch.full((b, heads), -1, dtype=torch.int32, device=device)
        state["anchor"] = torch.full(anchors, torch.nan, device=device)
    elif indices.shape[2] < width:
        state["indices"] = F.pad(indices, (0, width - indices.shape[2]), value=-1)


def put(target: Tensor, chosen: Tensor | None, values: Tensor, mask: Tensor | None) -> None:
    """Write `values` ``[R, ...]`` of the chosen (row, head) pairs into `target` ``[B, Hs, ...]`` where `mask` ``[B, Hs]``."""
    flat = target.flatten(0, 1)  # a view: every target here is contiguous
    every = torch.arange(len(flat), device=flat.device) if chosen is None else chosen
    if mask is not None:
        keep = mask.flatten()[every].view(-1, *(1,) * (values.dim() - 1))
        values = torch.where(keep, values, flat[every])
    flat.index_copy_(0, every, values)


def read_by_the_gate(state: State) -> int:
    """Return the bytes of the anchors, and of the axes along which they are compared."""
    return sum(state[name].numel() * state[name].element_size() for name in ("anchor", "axes") if name in state)
