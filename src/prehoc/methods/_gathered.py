"""Gathered copies of the selected keys and values, kept while a set is shared.

Plain torch gathers rows at a fraction of the memory bandwidth, so a set that serves several steps is gathered once. Native
kernels read the selected rows in place and do without.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
    pairs = range(b * hs) if chosen is None else chosen.tolist()
    share = hs // step.k.shape[1]
    indices = indices.clamp(min=0)
    for name, source in (("keys", step.k), ("values", step.v)):
        if name not in state:
            state[name] = source.new_zeros((b, hs, width, source.shape[3]))
        elif state[name].shape[2] < width:
            state[name] = F.pad(state[name], (0, 0, 0, width - state[name].shape[2]))
        for number, pair in enumerate(pairs):  # one gather a head, straight into its place
            row, head = divmod(pair, hs)
            target = state[name][row, head, : indices.shape[1]]
            torch.index_select(source[row, head // share], 0, indices[number], out=target)
