"""The yardstick: how fast this machine reads memory, measured in the same run."""

from __future__ import annotations

import time

import torch

from prehoc import kernels
from prehoc.bench.memory import YARDSTICK


def stream_bandwidth(repeats: int = 10) -> float:
    """Return the best read bandwidth in bytes per second over `repeats` sums of a buffer of `YARDSTICK` (torch's threads).

    A reduction reads every byte once and writes nothing; the buffer is larger than the caches of one core by far. Our own
    threads read it where the C++ kernels run, torch's sum elsewhere.
    """
    buffer, device = torch.ones(YARDSTICK["cpu"] // 4), torch.device("cpu")
    native = kernels.get(kernels.resolve("auto", device), device)
    if hasattr(native, "stream"):
        return float(native.stream(buffer, repeats))
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        buffer.sum()
        best = min(best, time.perf_counter() - begin)
    return buffer.numel() * 4 / best
