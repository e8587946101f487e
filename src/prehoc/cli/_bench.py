"""What the benchmarks' commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prehoc.config import unknown

DTYPES = ("float32", "bfloat16", "float16")


def numbers(option: str, text: str) -> list[int]:
    """Return the numbers of a list such as ``500,8000``, each once.

    Raises
    ------
    ValueError
        For anything else, or a number below 1.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text!r} is not a list of numbers; write for example 500,8000") from None
    if min(found) < 1:
        raise ValueError(f"{option} {text!r} has a number below 1")
    return list(dict.fromkeys(found))


def check_dtype(name: str) -> None:
    """Raise ValueError unless keys and values can have this dtype."""
    if name not in DTYPES:
        raise unknown("dtype", name, DTYPES)


def default_text() -> Path:
    """Return a text that is long and on every machine: a module of Python's library."""
    import argparse

    return Path(argparse.__file__)


def roofline(cell: dict[str, Any], weights: int, stream: float) -> dict[str, Any]:
    """Add to the rows of a decode cell what follows from times and bytes, and return the cell.

    Parameters
    ----------
    cell : dict
        ``batch``, ``context`` and the ``rows`` of `prehoc.bench.decode.bench_decode`, stock transformers and dense first.
    weights : int
        Bytes of the model's weights: each is read once a step.
    stream : float
        Bytes per second.
    """
    stock, dense = cell["rows"][:2]
    for row in cell["rows"]:
        row["tokens_per_second"] = cell["batch"] / row["step_ms"] * 1e3
        row["times_dense"] = row["dense_step_ms"] / row["step_ms"]
        # systems of different groups meet over the dense attention that ran beside each of them
        row["times_sdpa"] = row["times_dense"] * stock["step_ms"] / stock["dense_step_ms"]
        read = weights + row.get("bytes_per_step", dense["dense_bytes_per_step"])
        row["roofline_percent"] = read / stream / row["step_ms"] * 1e5
    return {**cell, "stream_bytes_per_second": stream, "weight_bytes": weights}
