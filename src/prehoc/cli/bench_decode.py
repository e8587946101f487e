"""``prehoc bench decode``: the time of a decode step on real text, stock transformers beside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from prehoc.cli import _bench, _common
from prehoc.files import check_writable, read_text


def command(
    model: _common.Model = "smollm2-135m-instruct",
    text_file: Annotated[
        Path | None, typer.Option(help="Text to read; a module of Python's library if not given.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Sequences decoded together; several separated by commas.")] = "1",
    context: Annotated[str, typer.Option(help="Prompt lengths in tokens, separated by commas.")] = "500,8000",
    methods: Annotated[
        str,
        typer.Option(
            help="Systems, separated by spaces: methods (budget = context / 8 where none is given), flex:METHOD (its selection, "
            "FlexAttention attends), compiled:METHOD, packed:SYSTEM (its linear layers packed), sdpa-static, sdpa-compiled. "
            "sdpa and dense are always there."
        ),
    ] = "cis:budget=1024 cpe:budget=1024",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 6,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of each system in a round.")] = 16,
    out: Annotated[Path | None, typer.Option(help="JSON document; its finished cells are kept.")] = None,
    dtype: _common.Dtype = "float32",
    backend: _common.Backend = None,
    threads: _common.Threads = None,
    seed: _common.Seed = 0,
    as_json: _common.Json = False,
) -> None:
    """Time a decode step on real text: stock transformers, our dense and the methods, interleaved.

    Beside the times stand throughput, time to first token, the bytes read, and the roofline: the time that reading the weights
    once and these bytes takes at the bandwidth of this machine.
    """
    lengths, batches = _bench.numbers("--context", context), _bench.numbers("--batch", batch)
    content, source = read_text(text_file or _bench.default_text())
    if out is not None:
        check_writable(out)
    import torch

    from prehoc import kernels, models, provenance
    from prehoc.bench import table
    from prehoc.bench.decode import bench_decode, check_systems, check_tokens, needed
    from prehoc.bench.stream import stream_bandwidth
    from prehoc.bench.systems import System
    from prehoc.cli._prompt import Reader
    from prehoc.config import default_backend
    from prehoc.files import write_document

    chosen = methods.split()
    for name in chosen:
        for length in lengths:
            System.of(name, length)
    _common.setup(threads, seed)
    resolved = kernels.resolve(default_backend() if backend is None else backend, torch.device("cpu"))
    with _common.resumable(out), _common.progress() as report:
        reader = Reader.before_weights(model, dtype, report)
        tokens = reader.tokenizer(content, verbose=False)["input_ids"]
        check_tokens(len(tokens), reader.positions, max(lengths), rounds, steps)
        facts = {
            "benchmark": "decode",
            "model": provenance.hide_folders(model),
            "dtype": dtype,
            "text": source,
            "settings": {"methods": chosen, "rounds": rounds, "steps": steps, "backend": resolved, "seed": seed},
            "machine": provenance.machine(),
            "versions": provenance.versions(),
        }
        cells = table.resume(out, facts)
        if cells:
            _common.log(f"{len(cells)} finished cells of {out} are kept")
        net, _ = models.load(model, dtype=dtype, progress=report)
        for length in lengths:
            check_systems(net, chosen, length, backend)
        ids = torch.tensor([tokens[: needed(max(lengths), rounds, steps) * max(batches)]])
        weights = sum(p.numel() * p.element_size() for p in net.parameters())
        for many in batches:
            for length in lengths:
                if any((cell["batch"], cell["context"]) == (many, length) for cell in cells):
                    continue
                report("memory bandwidth", 0, 0)
                stream = stream_bandwidth()
                rows = bench_decode(net, ids, length, chosen, rounds, steps, many, backend, seed, report)
                cells.append(_bench.roofline({"batch": many, "context": length, "rows": rows}, weights, stream))
                if out is not None:  # after each cell: an interruption keeps those that are finished
                    write_document(out, {**facts, "command": provenance.command(), "cells": cells})
    if as_json:
        _common.emit_json({**facts, "command": provenance.command(), "cells": cells})
    else:
        for cell in cells:
            _print(cell)


COLUMNS = (
    "ms",
    "10-90 %",
    "tokens/s",
    "attention",
    "selection",
    "rest",
    "x sdpa",
    "x dense",
    "% roofline",
    "keys",
    "MB read",
    "rho",
    "mass",
    "first s",
    "cache MB",
)


def _print(cell: dict[str, Any]) -> None:
    stream = cell["stream_bytes_per_second"]
    table = Table(title=f"decode step, {cell['batch']} x {cell['context']} tokens; stream {stream / 1e9:.1f} GB/s")
    table.add_column("system", overflow="fold")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in cell["rows"]:
        table.add_row(row["system"], *_cells(row))
    _common.show(table)


def _cells(row: dict[str, Any]) -> list[str]:
    def number(key: str, digits: int, factor: float = 1.0) -> str:
        value = row.get(key)
        return "" if value is None else f"{value * factor:.{digits}f}"

    return [
        number("step_ms", 1),
        f"{row['step_ms_10']:.1f}-{row['step_ms_90']:.1f}",
        number("tokens_per_second", 0),
        *(number(f"{part}_ms", 1) for part in ("attention", "selection", "rest")),
        number("times_sdpa", 2),
        number("times_dense", 2),
        number("roofline_percent", 0),
        number("keys_per_head", 0),
        number("bytes_per_step", 1, 1e-6),
        number("retrieval_ratio", 2),
        number("retained_mass", 3),
        "" if row["prefill_of"] else number("prefill_seconds", 2),
        number("cache_bytes", 0, 1e-6),
    ]
