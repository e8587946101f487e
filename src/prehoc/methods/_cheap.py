"""The int8 copy of a layer's keys that a cheap retrieval scores first; it is part of the selection state."""

from __future__ import annotations

import torch
from torch import Tensor

from prehoc.kernels.reference import compact
from prehoc.selection import State, Step

SPARE = 256  # columns allocated ahead
SCALE_BYTES = 4  # one float32 a key


def codes_of(state: State, step: Step) -> tuple[Tensor, Tensor]:
    """Return codes int8 ``[B, Hkv, n, D]`` and scales float32 ``[B, Hkv, n]`` of a step's keys, coding what is new."""
    reserve(state, step)
    have, n = state["coded"], step.columns
    codes, scales = state["codes"], state["scales"]
    codes[:, :, have:n], scales[:, :, have:n] = compact(step.k[:, :, have:])
    state["coded"] = n
    return codes[:, :, :n], scales[:, :, :n]


def reserve(state: State, step: Step) -> None:
    """Make room in the copy for a step's keys; how many it holds is ``state["coded"]``."""
    have, n = state.setdefault("coded", 0), step.columns
    if "codes" in state and state["codes"].shape[2] >= n:
        return
    b, heads, _, d = step.k.shape
    codes = torch.empty((b, heads, n + SPARE, d), dtype=torch.int8, device=step.k.device)
    scales = torch.empty((b, heads, n + SPARE), device=step.k.device)
    if have:
        codes[:, :, :have], scales[:, :, :have] = state["codes"][:, :, :have], state["scales"][:, :, :have]
    state["codes"], state["scales"] = codes, scales
