"""Where ``auto`` begins to pay on this machine."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from prehoc.methods import Auto
from prehoc.selection import Method


def break_even(method: Method, model: Any, backend: str) -> float:
    """Return the prompt length from which on a method is used: 0 for all but ``auto``, infinity where it never pays.

    `backend` is the resolved kernel backend: each has a break-even of its own.

    Warns
    -----
    RuntimeWarning
        When nothing was measured for such a model on this machine: ``auto`` is dense then.
    """
    if not isinstance(method, Auto):
        return 0
    from prehoc.bench import breakeven  # it measures through the engine

    chosen, dtype = method.method(), getattr(model, "dtype", torch.float32)
    device = next(model.parameters()).device
    found = breakeven.load(breakeven.shape_of(model.config), dtype, chosen, backend, device=device)
    if found is None:
        warnings.warn(
            "method auto stays dense: its break-even was not measured for a model of this shape on this machine; run prehoc "
            "bench break-even, or name a method",
            RuntimeWarning,
            stacklevel=4,
        )
    if found is None or found.length is None:
        return float("inf")
    return found.length
