"""What the host may do in the decode path, and the one view of queries that every operation shares."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

_LARGE_PAGE = 2**21
_MADV_HUGEPAGE = 14


def may_look(device: torch.device) -> bool:
    """Return whether reading a tensor's values costs nothing: on an accelerator the decode path must never wait for it."""
    return device.type == "cpu"


def wait(device: torch.device) -> None:
    """Wait until the device has done what it was given, so that a clock read now is honest."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def projected(q: Tensor, axes: Tensor) -> Tensor:
    """Return queries ``[B, H, D]`` along axes ``[B, Hkv, D, W]`` of their KV heads: float32 ``[B, H, W]``."""
    along: Tensor = q.float().unflatten(1, (axes.shape[1], -1)) @ axes
    return along.flatten(1, 2)


def group_queries(q: Tensor, selection_heads: int, kv_heads: int) -> Tensor:
    """Return q ``[B, H, D]`` as ``[B, Hs, G', D]``: the queries that share a selection head."""
    b, h, d = q.shape
    if selection_heads not in (h, kv_heads):
        raise ValueError(f"{selection_heads} selection heads fit neither {h} query heads nor {kv_heads} KV heads")
    return q.view(b, selection_heads, h // selection_heads, d)


def advise_large_pages(x: Tensor) -> None:
    """Ask Linux for large pages behind a new tensor in main memory: rows gathered from many small pages miss the TLB.

    It is advice: where the system does not know it, or gives none, nothing changes.
    """
    if x.device.type != "cpu" or sys.platform != "linux":
        return
    begin = -(-x.data_ptr() // _LARGE_PAGE) * _LARGE_PAGE
    length = (x.data_ptr() + x.nbytes - begin) // _LARGE_PAGE * _LARGE_PAGE
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), ctypes.c_int(_MADV_HUGEPAGE))
