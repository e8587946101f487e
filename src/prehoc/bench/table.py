"""The document of the attention benchmark: what is derived from times and bytes, what makes it invalid, and how it resumes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

REACH = {"cpu": (0.9, 0.75), "cuda": (0.85, 0.65)}
"""Shares of the stream bandwidth that reading in order and gathering are expected to reach."""
COLUMNS = {
    "ms": "ms",
    "10-90 %": "",
    "selection": "selection_ms",
    "attention": "attention_ms",
    "MB": "",
    "GB/s": "gb_per_second",
    "% stream": "stream_percent",
    "% attention": "attention_percent",
    "rho": "retrieval_ratio",
    "keys": "",
    "/ formula": "over_formula",
    "x dense": "times_dense",
    "x sdpa": "times_sdpa",
}


def derive(cell: dict[str, Any], device: str) -> list[str]:
    """Add to a cell's rows what follows from times, bytes and its stream bandwidth; return what cannot be true.

    Parameters
    ----------
    cell : dict
        A cell of `prehoc.bench.attention.bench_cell`; its rows are changed in place.
    device : {"cpu", "cuda"}
        Which of `REACH` the formula uses.

    Returns
    -------
    list of str
        A sentence for every row that reads faster than the stream: it, or the books, or the stream, is wrong.
    """
    if "rows" not in cell:
        return []
    rows = [row for row in cell["rows"] if "ms" in row]
    dense = next((row["ms"] for row in rows if row["row"] == "dense"), None)
    sdpa = min((row["ms"] for row in rows if row["row"].startswith("sdpa")), default=None)
    ordered, gathered = REACH[device]
    stream: float = cell["stream_bytes_per_second"]
    wrong = []
    for row in rows:
        kernel = row["bytes_processed"] + row["bytes_indices"]
        read = row["bytes_processed"] + row["bytes_copied"]
        scored = row["bytes_scored"] + row["bytes_compact"]
        ideal = scored / ordered + read / (gathered if row["gathers"] else ordered)
        rate = row["bytes_read"] / row["ms"] * 1e3
        row["gb_per_second"] = rate / 1e9
        row["stream_percent"] = rate / stream * 100
        row["attention_percent"] = kernel / row["attention_ms"] * 1e3 / stream * 100
        row["over_formula"] = row["ms"] / (ideal / stream * 1e3)
        row["times_dense"] = None if dense is None else dense / row["ms"]
        row["times_sdpa"] = None if sdpa is None else sdpa / row["ms"]
        fastest = max(row["stream_percent"], row["attention_percent"])
        if fastest > 100:
            place = f"{cell['shape']['name']} {cell['batch']} x {cell['length']}"
            wrong.append(f"{row['row']} at {place} reads at {fastest:.0f} % of the stream bandwidth")
    return wrong


def resume(path: Path | None, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the finished cells of an earlier run of the same settings on the same machine.

    Parameters
    ----------
    path : Path or None
        Its document, if there is one.
    facts : mapping
        Keys of the document that must be the same.

    Raises
    ------
    ValueError
        When the file holds something else: it is never overwritten.
    """
    if path is None or not path.exists():
        return []
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        cells = [cell for cell in document["cells"] if "rows" in cell]
        other = next((key for key, value in facts.items() if document[key] != value), None)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{str(path)!r} is not a file of prehoc bench {facts['benchmark']}; give another --out"
        ) from error
    if other is not None:
        changed = document[other]
        if isinstance(changed, dict):
            name = next(key for key in {**changed, **facts[other]} if changed.get(key) != facts[other].get(key))
            other, changed = f"{other} {name!r}", changed.get(name)
        raise ValueError(
            f"{str(path)!r} holds a run with another {other} ({changed!r}); give another --out, or remove the file"
        )
    return cells


def same_cell(one: Mapping[str, Any], shape: str, batch: int, length: int) -> bool:
    """Return whether a cell of a document is this one."""
    return bool((one["shape"]["name"], one["batch"], one["length"]) == (shape, batch, length))


def draw(cell: Mapping[str, Any]) -> Table | str:
    """Return a cell as a table for the terminal, or a sentence for one that was not run."""
    shape = cell["shape"]
    place = f"{shape['name']} ({shape['heads']}/{shape['kv_heads']} x {shape['dim']}), batch {cell['batch']} x {cell['length']}"
    if "skipped" in cell:
        return f"{place}: not run, {cell['skipped']}"
    table = Table(
        title=f"{place}; {len(cell['layers'])} layers; stream {cell['stream_bytes_per_second'] / 1e9:.1f} GB/s"
    )
    table.add_column("row", overflow="fold")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    notes = []
    for row in cell["rows"]:
        if "why" in row:
            notes.append(f"{row['row']} did not run: {row['why']}")
            continue
        own = {
            "10-90 %": f"{row['ms_10']:.3f}-{row['ms_90']:.3f}",
            "MB": f"{row['bytes_read'] / 1e6:.2f}",
            "keys": f"{row['keys_per_head']:.0f}",
        }
        table.add_row(row["row"], *(own.get(name) or _number(name, row.get(key)) for name, key in COLUMNS.items()))
        if "mask_ms" in row:
            notes.append(f"{row['row']}: building its mask takes {row['mask_ms']:.3f} ms more")
    table.caption = "\n".join(notes) or None
    return table


def _number(column: str, value: float | None) -> str:
    if value is None:
        return ""
    digits = 3 if column in ("ms", "selection", "attention") else 0 if column.startswith("%") else 2
    return f"{value:.{digits}f}"
