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
    context: Annotated[str, typer.Option(help="Prompt lengths in tokens, separated by commas.")] = "500,8000",
    methods: Annotated[str, typer.Option(help="Methods, separated by spaces; sdpa and dense are always there.")] = (
        "cis:budget=1024 cpe:budget=1024"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 6,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of each system in a round.")] = 16,
    batch: Annotated[int, typer.Option(min=1, help="Copies of the text decoded together.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write the JSON document here too.")] = None,
    dtype: _common.Dtype = "float32",
    backend: _common.Backend = None,
    threads: _common.Threads = None,
    seed: _common.Seed = 0,
    as_json: _common.Json = False,
) -> None:
    """Time a decode step: stock transformers (sdpa, dynamic cache), our dense and the methods, interleaved."""
    lengths = _bench.numbers("--context", context)
    content, source = read_text(text_file or _bench.default_text())
    if out is not None:
        check_writable(out)
    import torch

    from prehoc import models, provenance
    from prehoc.bench.decode import bench_decode, check_methods, check_tokens, needed
    from prehoc.bench.stream import stream_bandwidth
    from prehoc.cli._prompt import Reader
    from prehoc.eval.prefill_search import write_document
    from prehoc.methods import parse_method

    chosen = methods.split()
    for method in chosen:
        parse_method(method)
    _common.setup(threads, seed)
    rows: list[dict[str, Any]] = []
    with _common.progress() as report:
        reader = Reader.before_weights(model, dtype, report)
        tokens = reader.tokenizer(content, verbose=False)["input_ids"]
        check_tokens(len(tokens), reader.positions, max(lengths), rounds, steps)
        net, _ = models.load(model, dtype=dtype, progress=report)
        check_methods(net, chosen, backend)
        ids = torch.tensor([tokens[: needed(max(lengths), rounds, steps)]])
        report("memory bandwidth", 0, 0)
        stream = stream_bandwidth()
        document = {
            "benchmark": "decode",
            "model": provenance.hide_folders(model),
            "dtype": dtype,
            "text": source,
            "stream_bytes_per_second": stream,
            "machine": provenance.machine(),
            "versions": provenance.versions(),
            "command": provenance.command(),
            "contexts": lengths,
            "rows": rows,
        }
        for length in lengths:
            rows += bench_decode(net, ids, length, chosen, rounds, steps, batch, backend, seed, report)
            if out is not None:  # after each context: an interruption keeps those that are finished
                write_document(out, document)
    if as_json:
        _common.emit_json(document)
    else:
        _print(rows, stream)


def _print(rows: list[dict[str, Any]], stream: float) -> None:
    console = _bench.console()
    for length in dict.fromkeys(row["context"] for row in rows):
        here = {row["system"]: row for row in rows if row["context"] == length}
        table = Table(title=f"decode step at {length} tokens, median ms; stream {stream / 1e9:.1f} GB/s")
        columns = (
            "ms",
            "10-90 %",
            "attention",
            "selection",
            "rest",
            "x sdpa",
            "x dense",
            "keys",
            "MB read",
            "GB/s",
            "rho",
            "mass",
        )
        table.add_column("system")
        for column in columns:
            table.add_column(column, justify="right")
        for name, row in here.items():
            table.add_row(name, *_cells(row, here["sdpa"]["step_ms"], here["dense"]["step_ms"]))
        console.print(table)


def _cells(row: dict[str, Any], stock: float, dense: float) -> list[str]:
    cells = [f"{row['step_ms']:.1f}", f"{row['step_ms_10']:.1f}-{row['step_ms_90']:.1f}"]
    timed = "attention_ms" in row
    cells += [f"{row[f'{part}_ms']:.1f}" if timed else "" for part in ("attention", "selection", "rest")]
    cells += [f"{stock / row['step_ms']:.2f}", f"{dense / row['step_ms']:.2f}"]
    if not timed:
        return cells + [""] * 5
    seconds = (row["attention_ms"] + row["selection_ms"]) / 1e3
    rate = row["bytes_per_step"] / seconds / 1e9
    rho, mass = row["retrieval_ratio"], row["retained_mass"]
    return [
        *cells,
        f"{row['keys_per_head']:.0f}",
        f"{row['bytes_per_step'] / 1e6:.1f}",
        f"{rate:.1f}",
        "" if rho is None else f"{rho:.2f}",
        "" if mass is None else f"{mass:.3f}",
    ]
