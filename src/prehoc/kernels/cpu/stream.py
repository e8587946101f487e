"""The yardsticks on this backend: how fast our threads read memory, in order and where a selection points."""

from __future__ import annotations

import ctypes
import time

import torch
from torch import Tensor

from prehoc.kernels.cpu.arguments import numbers, pointer, storage, strides
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


def gather(k: Tensor, v: Tensor, indices: Tensor, lengths: Tensor) -> int:
    """Read what `decode_selected` reads and compute nothing: its time is the least that the memory allows for a selection.

    Parameters
    ----------
    k, v : Tensor
        Storage dtype ``[B, Hkv, n, D]`` and ``[B, Hkv, n, Dv]``, unit stride in the last dimension.
    indices, lengths : Tensor
        int32 ``[B, Hs, W]`` columns of the selected keys, and ``[B, Hs]`` how many.

    Returns
    -------
    int
        The exclusive or of all 32-bit words, which keeps the compiler from leaving the reads out.
    """
    b, hs, width = indices.shape
    lists, counts = indices.to(torch.int32).contiguous(), lengths.to(torch.int32).contiguous()
    read = library().prehoc_gather
    read.restype = ctypes.c_uint32
    return int(
        read(
            storage(k),
            pointer(k),
            pointer(v),
            strides(k, v),
            numbers((b, k.shape[1], hs, k.shape[3], v.shape[3], width)),
            pointer(lists),
            pointer(counts),
        )
    )
