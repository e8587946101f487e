"""Kernel backends: one module a backend, found by name; `auto` takes the fastest that can run on the device."""

from __future__ import annotations

from types import ModuleType

import torch

from prehoc.config import unknown
from prehoc.kernels import prefill, reference

BACKENDS = ("auto", "reference")


def check_backend(name: str) -> str:
    """Return `name` if such a backend exists.

    Raises
    ------
    ValueError
        For an unknown backend, with the nearest known name.
    """
    if name not in BACKENDS:
        raise unknown("backend", name, BACKENDS)
    return name


def get(name: str, device: torch.device) -> ModuleType:
    """Return the module with the operations of backend `name` on `device`."""
    return reference


__all__ = ["BACKENDS", "check_backend", "get", "prefill", "reference"]
