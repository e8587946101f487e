"""Kernel backends: one module a backend, found by name; `auto` takes the fastest that can run on the device."""

from __future__ import annotations

import functools
import importlib
import warnings
from types import ModuleType

import torch

from prehoc.config import unknown
from prehoc.kernels import prefill, reference

BACKENDS = ("auto", "reference", "cpu")
NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of keys and values; the torch kernels take any


def resolve(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """Return the backend that `name` means on `device` for keys and values of `dtype`.

    Raises
    ------
    ValueError
        For an unknown backend (with the nearest known name), or one asked for by name that cannot run here.
    """
    if name not in BACKENDS:
        raise unknown("backend", name, BACKENDS)
    if name == "auto":
        if device.type != "cpu":
            return "reference"
        if dtype not in NATIVE_DTYPES:
            _warn(dtype)
            return "reference"
        return "cpu" if _cpu_or_warning() else "reference"
    if name == "cpu":
        if device.type != "cpu":
            raise ValueError(f"backend 'cpu' cannot run on {device}; use auto or reference")
        if dtype not in NATIVE_DTYPES:
            raise ValueError(
                f"backend 'cpu' cannot run with {dtype}; use auto or reference, or load the model in float32"
            )
        if (reason := _cpu_fails()) is not None:
            raise ValueError(f"backend 'cpu' cannot run here: {reason}; or use backend 'reference', which is slower")
    return name


def get(name: str, device: torch.device) -> ModuleType:
    """Return the module with the operations of backend `name` on `device`."""
    if name == "auto":
        name = resolve(name, device)
    return reference if name == "reference" else _module(name)


@functools.cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"prehoc.kernels.{name}")


@functools.cache
def _cpu_fails() -> str | None:
    """Compile or find the C++ kernels; return why that fails, None when they run."""
    cpu = _module("cpu")
    try:
        cpu.library()
    except (cpu.BuildError, OSError) as error:
        return str(error)
    return None


@functools.cache
def _cpu_or_warning() -> bool:
    reason = _cpu_fails()
    if reason is not None:
        warnings.warn(f"prehoc uses its slow torch kernels: {reason}", RuntimeWarning, stacklevel=2)
    return reason is None


@functools.cache
def _warn(dtype: torch.dtype) -> None:
    warnings.warn(f"prehoc uses its slow torch kernels: no native one takes {dtype}", RuntimeWarning, stacklevel=3)


__all__ = ["BACKENDS", "get", "prefill", "reference", "resolve"]
