"""Memory facts of a machine that a benchmark must know: how large its last cache is, and how much is free."""

from __future__ import annotations

from pathlib import Path

import torch

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNKNOWN_CACHE = 64 * 2**20
YARDSTICK = {"cpu": 2**30, "cuda": 2**32}
"""Bytes that measuring the bandwidth of a kind of device takes."""


def last_cache_bytes(device: torch.device) -> int:
    """Return the bytes of the last cache before memory (64 MiB where the system does not say)."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [_size(file) for file in _CACHES.glob("index*/size")]
    return max(sizes, default=_UNKNOWN_CACHE)


def _size(file: Path) -> int:
    text = file.read_text().strip()
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated (None where the system does not say)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    return next((int(line.split()[1]) * 2**10 for line in lines if line.startswith("MemAvailable")), None)


def device_bandwidth(device: torch.device) -> float:
    """Return the best read bandwidth of an accelerator in bytes per second, over ten sums of a buffer."""
    buffer = torch.ones(YARDSTICK["cuda"] // 4, device=device)
    best = float("inf")
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        buffer.sum()
        end.record()
        torch.cuda.synchronize(device)
        best = min(best, begin.elapsed_time(end) / 1e3)
    return buffer.numel() * 4 / best
