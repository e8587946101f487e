"""The yardstick on this backend: how fast our threads read memory."""

from __future__ import annotations

import ctypes
import time

from torch import Tensor

from prehoc.kernels.cpu.arguments import pointer
from prehoc.kernels.cpu.build import library


def stream(buffer: Tensor, repeats: int) -> float:
    """Return the best read bandwidth in bytes per second over `repeats` reads of a contiguous float32 buffer.

    Raises
    ------
    ValueError
        If a buffer of another dtype is given.
    """
    if buffer.dtype.itemsize != 4:
        raise ValueError(f"the stream reads float32, not {buffer.dtype}")
    read = library().prehoc_stream
    read.restype = ctypes.c_float
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        read(pointer(buffer), ctypes.c_int64(buffer.numel()))
        best = min(best, time.perf_counter() - begin)
    return buffer.numel() * 4 / best
