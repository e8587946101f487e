"""What every Triton kernel needs from the host: checks, sizes that follow from shapes, and per-row numbers on the device.

Nothing here waits for the device or reads one of its values, so that every operation can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

MAX_HEAD_SIZE = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETED: bool = triton.knobs.runtime.interpret  # on the CPU, by Triton's interpreter: slow, for tests

# Split-K: one more split while fewer than WAVES programs per multiprocessor run and each split keeps SPLIT_KEYS keys; where
# a gate lets most heads rest, the others are split further.
WAVES, GATED_WAVES = 4, 16
SPLIT_KEYS = 256
MAX_SPLITS = 64


def check(q: Tensor, k: Tensor, v: Tensor | None = None) -> None:
    """Raise ValueError unless the kernels take these queries ``[..., D]``, keys ``[..., D]`` and values ``[..., Dv]``."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is None:
            continue
        if x.dtype not in DTYPES:
            raise ValueError(
                f"{name} has dtype {x.dtype}, which the triton backend does not take; use float32, bfloat16 or float16"
            )
        if x.dtype != q.dtype:
            raise ValueError(f"q is {q.dtype} but {name} is {x.dtype}; the triton backend needs one dtype")
        if x.shape[-1] > MAX_HEAD_SIZE:
            raise ValueError(
                f"{name} has head size {x.shape[-1]}; the triton backend takes at most {MAX_HEAD_SIZE}: "
                "use backend 'reference'"
            )
        if x.device.type == "cpu" and not INTERPRETED:
            raise ValueError("the triton backend cannot run on the CPU; use backend 'cpu' or 'reference'")


def padded(size: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `size` and `least`: what a Triton tile can hold."""
    return max(int(triton.next_power_of_2(size)), least)


def splits(keys: int, programs: int, device: torch.device, waves: int) -> int:
    """Return in how many parts at most `keys` keys are read by `programs` heads, from shapes alone (`waves`: see WAVES)."""
    fill = -(-waves * _processors(device) // programs)
    return max(1, min(fill, -(-keys // SPLIT_KEYS), MAX_SPLITS))


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 64  # the interpreter has none: as many as let tests meet several splits
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def per_row(device: torch.device, *lines: tuple[int, ...]) -> Tensor:
    """Return int32 ``[lines, B]`` on the device: numbers that the host knows of each row, such as its first real column.

    The copy comes from pinned memory and is kept, so that equal numbers are sent once; a graph that is being captured gets
    its own tensor, filled by kernels that carry the numbers.
    """
    if device.type != "cuda":
        return torch.tensor(lines, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        out = torch.empty((len(lines), len(lines[0])), dtype=torch.int32, device=device)
        for line, values in zip(out, lines, strict=True):
            line.fill_(values[0])
            for row in (row for row, value in enumerate(values) if value != values[0]):
                line[row : row + 1].fill_(values[row])
        return out
    return _sent(lines, device, torch.cuda.current_stream(device).cuda_stream)


@functools.lru_cache(maxsize=128)
def _sent(lines: tuple[tuple[int, ...], ...], device: torch.device, stream: int) -> Tensor:
    # the stream is part of the key: on another one nothing would order the copy before its use
    return torch.tensor(lines, dtype=torch.int32).pin_memory().to(device, non_blocking=True)
