"""Kernel backends: one module a backend, found by name; `auto` takes the fastest that can run on the device."""

from __future__ import annotations

import functools
import importlib
import warnings
from types import ModuleType

import torch

from prehoc.config import unknown
from prehoc.kernels import prefill, reference

BACKENDS = ("auto", "reference", "cpu", "triton")
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
        if device.type not in ("cpu", "cuda"):
            return "reference"
        if dtype not in NATIVE_DTYPES:
            _warn(dtype)
            return "reference"
        if device.type == "cuda":
            return "triton" if _runs_or_warning("triton", device) else "reference"
        return "cpu" if _runs_or_warning("cpu", device) else "reference"
    if name == "reference":
        return name
    if name == "cpu" and device.type != "cpu":
        raise ValueError(f"backend 'cpu' cannot run on {device}; use auto or reference")
    if dtype not in NATIVE_DTYPES:
        raise ValueError(
            f"backend {name!r} cannot run with {dtype}; use auto or reference, or load the model in float32"
        )
    if (reason := _fails(name, device)) is not None:
        raise ValueError(f"backend {name!r} cannot run here: {reason}; or use backend 'reference', which is slower")
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
def _triton_fails(device: torch.device) -> str | None:
    """Return why Triton's kernels cannot run on `device`, None when they can."""
    try:
        launch = importlib.import_module("prehoc.kernels.triton.launch")
    except ImportError as error:
        return f"{error}; install triton, the version that your torch names"
    if launch.INTERPRETED:
        return None
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device} (TRITON_INTERPRET=1 runs it there, very slowly, to test it)"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device; install a torch with CUDA, and a driver"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"{device} has compute capability {major}.{minor}; it needs 8.0 (Ampere) or later"
    return None


def _fails(name: str, device: torch.device) -> str | None:
    """Return why a native backend cannot run on `device`, None when it can."""
    return _cpu_fails() if name == "cpu" else _triton_fails(device)


@functools.cache
def _runs_or_warning(name: str, device: torch.device) -> bool:
    reason = _fails(name, device)
    if reason is not None:
        warnings.warn(f"prehoc uses its slow torch kernels: {reason}", RuntimeWarning, stacklevel=2)
    return reason is None


@functools.cache
def _warn(dtype: torch.dtype) -> None:
    warnings.warn(f"prehoc uses its slow torch kernels: no native one takes {dtype}", RuntimeWarning, stacklevel=3)


__all__ = ["BACKENDS", "get", "prefill", "reference", "resolve"]
