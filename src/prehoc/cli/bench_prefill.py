"""``prehoc bench prefill``: what pruning a prompt saves in operations and in time."""

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
    length: Annotated[str, typer.Option(help="Prompt lengths in tokens, separated by commas.")] = "2048,4096,8192",
    methods: Annotated[str, typer.Option(help="Methods, separated by spaces; sdpa and dense are always there.")] = (
        "psaw etf cpe:parts=psaw+etf"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 5,
    batch: Annotated[int, typer.Option(min=1, help="Copies of the text read together.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write the JSON document here too.")] = None,
    dtype: _common.Dtype = "float32",
    backend: _common.Backend = None,
    threads: _common.Threads = None,
    as_json: _common.Json = False,
) -> None:
    """Time a prompt up to its first token and count its operations: stock transformers, our dense and the methods."""
    lengths = _bench.numbers("--length", length)
    content, source = read_text(text_file or _bench.default_text())
    if out is not None:
        check_writable(out)
    import torch

    from prehoc import models, provenance
    from prehoc.bench.decode import check_methods
    from prehoc.bench.prefill import bench_prefill, check_length
    from prehoc.cli._prompt import Reader
    from prehoc.files import write_document
    from prehoc.methods import parse_method

    chosen = methods.split()
    for method in chosen:
        parse_method(method)
    _common.setup(threads)
    rows: list[dict[str, Any]] = []
    with _common.progress() as report:
        reader = Reader.before_weights(model, dtype, report)
        tokens = reader.tokenizer(content, verbose=False)["input_ids"]
        check_length(len(tokens), reader.positions, max(lengths))
        net, _ = models.load(model, dtype=dtype, progress=report)
        check_methods(net, chosen, backend)
        ids = torch.tensor([tokens[: max(lengths)]])
        document = {
            "benchmark": "prefill",
            "model": provenance.hide_folders(model),
            "dtype": str(net.dtype).removeprefix("torch."),
            "text": source,
            "machine": provenance.machine(),
            "versions": provenance.versions(),
            "command": provenance.command(),
            "lengths": lengths,
            "rows": rows,
        }
        for size in lengths:
            rows += bench_prefill(net, ids, size, chosen, rounds, batch, backend, report)
            if out is not None:  # after each length: an interruption keeps those that are finished
                write_document(out, document)
    if as_json:
        _common.emit_json(document)
        return
    for size in lengths:
        _common.show(_table([row for row in rows if row["length"] == size], size, batch))


def _table(rows: list[dict[str, Any]], length: int, batch: int) -> Table:
    table = Table(title=f"prompt of {length} tokens, batch {batch}: time to the first token")
    table.add_column("system")
    for column in ("seconds", "10-90 %", "tokens/s", "x sdpa", "x dense", "G operations", "of dense", "G/s"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [
            f"{row['seconds']:.3f}",
            f"{row['seconds_10']:.3f}-{row['seconds_90']:.3f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['times_sdpa']:.2f}",
            f"{row['times_dense']:.2f}",
        ]
        if "operations" in row:
            cells += [
                f"{row['operations'] / 1e9:.1f}",
                f"{row['operations'] / row['operations_dense']:.1%}",
                f"{row['operations_per_second'] / 1e9:.0f}",
            ]
        table.add_row(row["system"], *cells)
    return table
