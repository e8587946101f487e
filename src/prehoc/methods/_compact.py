"""Compact copies of the selected keys and values, kept while a set is shared.

Plain torch gathers rows at a fraction of the memory bandwidth, so a set that serves several steps is gathered once. Native
kernels read the selected rows in place and do without.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from prehoc.kernels.reference import gather_pairs
from prehoc.selection import State, Step


def append(state: State, step: Step, slots: Tensor) -> None:
    """Write the newest key and value of each head into its slot (int64 ``[B, Hs, 1]``)."""
    for name, source in (("keys", step.k), ("values", step.v)):
        copy: Tensor = state[name]  # [B, Hs, K, D]
        b, hs, _, d = copy.shape
        newest = source[:, :, -1:].repeat_interleave(hs // source.shape[1], 1)  # [B, Hs, 1, D]
        copy.scatter_(2, slots[..., None].expand(b, hs, 1, d), newest)


def refill(state: State, step: Step, chosen: Tensor | None, indices: Tensor) -> None:
    """Copy the rows of new lists (int32 ``[R, K]``) for the chosen heads."""
    b, hs, width = state["indices"].shape
    pairs = torch.arange(b * hs, device=indices.device) if chosen is None else chosen
    for name, source in (("keys", step.k), ("values", step.v)):
        rows = gather_pairs(source, indices, pairs, hs)  # [R, K, D]
        if name not in state:
            state[name] = rows.new_zeros((b, hs, width, rows.shape[2]))
        elif state[name].shape[2] < width:
            state[name] = F.pad(state[name], (0, 0, 0, width - state[name].shape[2]))
        state[name].flatten(0, 1)[pairs, : rows.shape[1]] = rows
