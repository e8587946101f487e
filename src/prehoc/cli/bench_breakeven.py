"""``prehoc bench break-even``: from which length on a method is worth it on this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from prehoc.cli import _bench, _common
from prehoc.files import check_writable


def command(
    shape: Annotated[
        str, typer.Option(help="llama2-7b, qwen2.5-7b, smollm2, or traced: that of --inputs.")
    ] = "smollm2",
    methods: Annotated[str, typer.Option(help="Methods, separated by spaces, with the budget they will have.")] = "cpe",
    length: Annotated[str, typer.Option(help="Cached tokens, separated by commas.")] = "512,1024,2048,4096,8192",
    batch: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 1,
    inputs: Annotated[
        list[str] | None,
        typer.Option(help="random, or a file of prehoc trace --record qkv; repeat it for traces of several lengths."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Consecutive decode steps, which amortise the retrievals.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved repetitions.")] = 3,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers to run, evenly spaced over the depth (default: all).")
    ] = None,
    device: _common.Device = "cpu",
    out: Annotated[Path | None, typer.Option(help="Write the JSON document here too.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    backend: _common.Backend = None,
    threads: _common.Threads = None,
    seed: _common.Seed = 0,
    as_json: _common.Json = False,
) -> None:
    """Measure below which length dense attention is faster, and keep it in the cache folder for --method auto.

    Random inputs share as long as they may: trace a real model for a break-even that holds.
    """
    lengths = _bench.numbers("--length", length)
    _bench.check_dtype(dtype)
    if out is not None:
        check_writable(out)
    import torch

    from prehoc import kernels, provenance
    from prehoc.bench.attention import LEAD, Setup
    from prehoc.bench.breakeven import break_even, path
    from prehoc.bench.inputs import open_inputs
    from prehoc.bench.lineup import check_steps
    from prehoc.config import default_backend
    from prehoc.files import write_document
    from prehoc.methods import parse_method

    _common.check_device(device)
    place, kind = torch.device(device), getattr(torch, dtype)
    chosen = {text: parse_method(text) for text in methods.split()}
    for text, method in chosen.items():
        check_steps(text, method, steps)
    _common.setup(threads, seed)
    resolved = kernels.resolve(default_backend() if backend is None else backend, place, kind)
    source = open_inputs(inputs or ["random"], seed)
    sizes = source.shape(shape)
    for tokens in lengths:
        source.check(tokens, steps + LEAD)
    setup = Setup((), kind, resolved, steps, rounds, layers, device=place)
    with _common.progress() as report:
        found = {
            text: break_even(sizes, source, method, lengths, batch, setup, report) for text, method in chosen.items()
        }
    _common.log(f"kept in {path()}")
    document = {
        "benchmark": "break-even",
        "shape": dataclasses.asdict(sizes),
        "batch": batch,
        "settings": {"inputs": source.describe(), "steps": steps, "rounds": rounds, "layers": layers, "device": device},
        "dtype": dtype,
        "backend": resolved,
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "command": provenance.command(),
        "methods": [{**dataclasses.asdict(one), "length": one.length} for one in found.values()],
    }
    if out is not None:
        write_document(out, document)
    if as_json:
        _common.emit_json(document)
        return
    for text, measured in found.items():
        begin = "never" if measured.length is None else f"from {measured.length} tokens on"
        print(f"{text}: faster than dense {begin} (of the lengths measured)")
        table = Table()
        for column in ("length", "dense ms", "method ms", "x dense", "rho"):
            table.add_column(column, justify="right")
        for tokens, dense, ours, ratio in zip(
            measured.lengths, measured.dense_ms, measured.method_ms, measured.retrieval_ratio, strict=True
        ):
            rho = "" if ratio is None else f"{ratio:.2f}"
            table.add_row(str(tokens), f"{dense:.3f}", f"{ours:.3f}", f"{dense / ours:.2f}", rho)
        _common.show(table)
