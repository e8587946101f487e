"""The length below which dense attention is faster than a method on this machine: measured once, kept in the cache folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from prehoc import provenance
from prehoc.bench.attention import Cell, Setup, bench_cell
from prehoc.bench.inputs import Inputs, Shape
from prehoc.bench.lineup import method_row
from prehoc.config import cache_dir
from prehoc.files import atomic_path
from prehoc.methods import describe, every_key, parse_method
from prehoc.selection import Method

FILE = "breakeven.json"


@dataclasses.dataclass(frozen=True)
class BreakEven:
    """Milliseconds of the attention operator of one layer, dense and with a method, by length.

    Parameters
    ----------
    method : str
        As `describe` writes it.
    lengths : tuple of int
        Cached tokens, ascending.
    dense_ms, method_ms : tuple of float
        Per length.
    retrieval_ratio : tuple of float or None
        ρ̂ of the inputs it was measured with, per length (None: nothing to choose).
    """

    method: str
    lengths: tuple[int, ...]
    dense_ms: tuple[float, ...]
    method_ms: tuple[float, ...]
    retrieval_ratio: tuple[float | None, ...]

    @property
    def length(self) -> int | None:
        """Return the shortest measured length from which on the method was faster at all; None if it never was."""
        found = None
        for length, dense, method in zip(*map(reversed, (self.lengths, self.dense_ms, self.method_ms)), strict=True):
            if method >= dense:
                break
            found = length
        return found

    def dense_wins(self, tokens: int) -> bool:
        """Return whether dense is the faster choice at `tokens` cached tokens."""
        return self.length is None or tokens < self.length


def shape_of(config: Any) -> Shape:
    """Return the attention shape of a transformers configuration."""
    text = config.get_text_config(decoder=True)
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    return Shape("model", int(text.num_hidden_layers), heads, kv_heads, dim)


def measure(
    shape: Shape,
    inputs: Inputs,
    method: Method,
    lengths: Sequence[int],
    batch: int,
    setup: Setup,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> BreakEven:
    """Measure dense and a method, interleaved, at every length; nothing is stored.

    Parameters
    ----------
    shape : Shape
        Of the model.
    inputs : Inputs
        Where queries, keys and values come from. Random ones share as long as they may: a lower bound of the break-even.
    method : Method
        With its own budget, as an engine would use it.
    lengths : sequence of int
        Cached tokens.
    batch : int
        Sequences decoded together.
    setup : Setup
        How; its methods are not used.
    progress : callable
        Called with (stage, done, total).

    Raises
    ------
    ValueError
        When a length does not fit into memory.
    """
    found = []
    for length in sorted(set(lengths)):
        rows = [
            method_row(name, chosen, setup.backend, setup.device)
            for name, chosen in (("dense", parse_method("dense")), (describe(method), method))
        ]
        cell = bench_cell(Cell(shape, batch, length), inputs, setup, progress, rows)
        if "skipped" in cell:
            raise ValueError(f"length {length} with batch {batch} {cell['skipped']}; give shorter lengths")
        dense, ours = cell["rows"]
        found.append((length, dense["ms"], ours["ms"], ours["retrieval_ratio"]))
    sizes, dense_ms, method_ms, ratios = zip(*found, strict=True)
    return BreakEven(describe(method), sizes, dense_ms, method_ms, ratios)


def break_even(
    shape: Shape,
    inputs: Inputs,
    method: Method,
    lengths: Sequence[int],
    batch: int,
    setup: Setup,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> BreakEven:
    """Measure as `measure` does and keep the result for `load`."""
    found = measure(shape, inputs, method, lengths, batch, setup, progress)
    key = _key(shape, setup.dtype, method, setup.device, setup.backend)
    entries = [entry for entry in _entries() if not (entry["key"] == key and entry["batch"] == batch)]
    entries.append({"key": key, "batch": batch, "inputs": inputs.describe(), "measured": dataclasses.asdict(found)})
    path().parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path()) as part:
        part.write_text(json.dumps({"entries": entries}, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return found


def load(
    shape: Shape,
    dtype: torch.dtype,
    method: Method,
    backend: str,
    batch: int = 1,
    device: torch.device | None = None,
) -> BreakEven | None:
    """Return what was measured on this machine with these threads, at the nearest batch size; None if nothing was.

    Parameters
    ----------
    shape : Shape
        Of the model; its name does not matter.
    dtype : dtype
        Of keys and values.
    method : Method
        The method, with all its keys.
    backend : str
        Kernel backend, resolved.
    batch : int
        Sequences decoded together.
    device : device, optional
        Where (default: the CPU).
    """
    key = _key(shape, dtype, method, device or torch.device("cpu"), backend)
    same = [entry for entry in _entries() if entry["key"] == key]
    if not same:
        return None
    nearest: dict[str, Any] = min(same, key=lambda entry: abs(int(entry["batch"]) - batch))["measured"]
    columns = {name: tuple(value) for name, value in nearest.items() if name != "method"}
    return BreakEven(nearest["method"], **columns)


def path() -> Path:
    """Return the file of all measurements."""
    return cache_dir() / FILE


def _key(shape: Shape, dtype: torch.dtype, method: Method, device: torch.device, backend: str) -> dict[str, Any]:
    """Return what a measurement is valid for."""
    return {
        "machine": provenance.machine(),
        "device": device.type,
        "backend": backend,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": [shape.layers, shape.heads, shape.kv_heads, shape.dim],
        "method": json.loads(json.dumps(every_key(method))),  # as it is kept
        "versions": {name: provenance.version(name) for name in ("prehoc", "torch")},
    }


def _entries() -> list[dict[str, Any]]:
    try:
        entries = json.loads(path().read_text(encoding="utf-8"))["entries"]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path()} is damaged ({error}); remove it and run prehoc bench break-even again") from error
    return list(entries)
