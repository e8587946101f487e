"""Which rows a cell has, and the budgets of its methods."""

from __future__ import annotations

import torch

from prehoc.bench.evicting import EvictingRow
from prehoc.bench.rows import SDPA, FlexRow, MethodRow, ReadRow, Row, SdpaRow
from prehoc.methods import CIS, Dense, parse_method
from prehoc.methods._eviction import Evictor
from prehoc.selection import Method

SIZES = ("budget", "ratio", "critical", "mass")


def sized(text: str, length: int) -> Method:
    """Return the method of a string; one that has a budget and states no size gets an eighth of the length.

    Raises
    ------
    ValueError
        As `prehoc.methods.parse_method`; of a budget that the user did not write it says where it comes from.
    """
    method = parse_method(text)
    stated = [getattr(method, size, None) for size in SIZES]
    if not hasattr(method, "budget") or any(value is not None for value in stated):
        return method
    try:
        return parse_method(text, {"budget": length // 8})
    except ValueError as error:
        raise ValueError(
            f"{text}: {error}; it states no size, and then budget = context / 8 (here {length} / 8)"
        ) from error


def check_steps(name: str, method: Method, steps: int) -> None:
    """Raise ValueError unless the steps are whole blocks of a method: a part of one holds too few retrievals, or too many."""
    block = getattr(method, "block_size", 1)
    if steps % block:
        raise ValueError(
            f"{steps} steps are no multiple of the block_size {block} of {name}; give {-(-steps // block) * block}"
        )


def method_row(name: str, method: Method, backend: str, device: torch.device) -> Row:
    """Return the row of a method."""
    kind = EvictingRow if isinstance(method, Evictor) else MethodRow
    return kind(name, method, backend, device)


def make_rows(
    methods: list[str], length: int, kv_bytes: int, dtype: torch.dtype, backend: str, device: torch.device
) -> list[Row]:
    """Return torch's rows, dense, FlexAttention with the pattern of the first CIS, bare reads of what both read, and the methods.

    Parameters
    ----------
    methods : list of str
        Method strings.
    length : int
        Columns of the cell.
    kv_bytes : int
        Bytes of one layer's keys and values.
    dtype, backend, device
        What they run with.
    """
    rows: list[Row] = [SdpaRow(kernel, kv_bytes, dtype) for kernel in SDPA[device.type]]
    rows.append(method_row("dense", Dense(), backend, device))
    if backend == "cpu":
        rows.append(ReadRow(MethodRow("dense", Dense(), backend, device), length))
    shared = next((text for text in methods if isinstance(sized(text, length), CIS)), None)
    if shared is not None:
        rows.append(FlexRow(MethodRow(shared, sized(shared, length), backend, device), length))
        if backend == "cpu":
            rows.append(ReadRow(MethodRow(shared, sized(shared, length), backend, device), length))
    others = [text for text in dict.fromkeys(methods) if text != "dense"]
    return rows + [method_row(text, sized(text, length), backend, device) for text in others]
