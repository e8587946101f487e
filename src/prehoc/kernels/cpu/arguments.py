"""How tensors and numbers reach the C++ kernels."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
STRIP = 16  # keys side by side that score together when a block holds [D, block]


def pointer(x: Tensor | None) -> ctypes.c_void_p:
    """Return where the storage of x begins; null for None."""
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def numbers(values: tuple[int, ...]) -> Any:
    """Return an array of int64."""
    return (ctypes.c_int64 * len(values))(*values)


def strides(k: Tensor, v: Tensor | None = None, paged: bool = False) -> Any:
    """Return the strides of keys and values ``[B or NB, Hkv, n or block, D]``, last the one between the elements of a key.

    Raises
    ------
    ValueError
        If a row of keys or values is not contiguous; keys in blocks of ``[D, block]`` are allowed (`paged`).
    """
    in_strips = paged and k.stride(2) == 1 and k.stride(3) != 1 and k.shape[2] % STRIP == 0
    if (k.stride(3) != 1 and not in_strips) or (v is not None and v.stride(3) != 1):
        raise ValueError("keys and values must be contiguous along the head dimension")
    return numbers((*k.stride()[:3], *(v.stride()[:3] if v is not None else (0, 0, 0)), k.stride(3)))


def storage(x: Tensor) -> int:
    """Return the number that stands for the dtype of x.

    Raises
    ------
    ValueError
        For a dtype that the kernels do not read.
    """
    if x.dtype not in _TYPES:
        raise ValueError(f"dtype {x.dtype} is not supported by the cpu backend; use float32, bfloat16 or float16")
    return _TYPES[x.dtype]
