"""``prehoc bench attention``: the attention operator of a decode step, Table IV of the paper on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from prehoc.cli import _bench, _common
from prehoc.files import check_writable

METHODS = "streaming oracle cis-8:matched=true cis-16:matched=true cpe-8:matched=true cpe-16:matched=true"


def command(
    shape: Annotated[
        str, typer.Option(help="llama2-7b, qwen2.5-7b, smollm2, traced (that of --inputs); separated by commas.")
    ] = "llama2-7b",
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,8,16",
    length: Annotated[str, typer.Option(help="Cached tokens, separated by commas.")] = "2048,4096,16384,32768",
    methods: Annotated[
        str,
        typer.Option(
            help="Methods, separated by spaces; budget = length / 8 where none is given. Torch's attention, FlexAttention and "
            "dense are always there."
        ),
    ] = METHODS,
    inputs: Annotated[
        list[str] | None,
        typer.Option(help="random, or a file of prehoc trace --record qkv; repeat it for traces of several lengths."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Consecutive decode steps, which amortise the retrievals.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved repetitions.")] = 3,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers to run, evenly spaced over the depth (default: all).")
    ] = None,
    refcheck: Annotated[bool, typer.Option("--refcheck", help="Compare every row with the reference first.")] = False,
    device: _common.Device = "cpu",
    out: Annotated[Path | None, typer.Option(help="JSON document; its finished cells are kept.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    backend: _common.Backend = None,
    threads: _common.Threads = None,
    seed: _common.Seed = 0,
    as_json: _common.Json = False,
) -> None:
    """Time gate, retrieval, dilation and attention of one layer at one decode step, amortised over real blocks.

    Every method runs as the engine runs it, on a cold cache, interleaved with dense attention. Times stand beside the bytes
    moved, the bandwidth of this machine and the time that these bytes should take.
    """
    sizes, batches = _bench.numbers("--length", length), _bench.numbers("--batch", batch)
    _bench.check_dtype(dtype)
    if out is not None:
        check_writable(out)
    import torch

    from prehoc import kernels, provenance
    from prehoc.bench import memory, stream, table
    from prehoc.bench.attention import LEAD, Cell, Setup, bench_cell
    from prehoc.bench.inputs import open_inputs
    from prehoc.bench.lineup import check_steps, sized
    from prehoc.bench.refcheck import RefcheckError
    from prehoc.config import default_backend
    from prehoc.files import write_document

    _common.check_device(device)
    place = torch.device(device)
    kind: torch.dtype = getattr(torch, dtype)
    _common.setup(threads, seed)
    resolved = kernels.resolve(default_backend() if backend is None else backend, place, kind)
    source = open_inputs(inputs or ["random"], seed)
    setup = Setup(tuple(methods.split()), kind, resolved, steps, rounds, layers, refcheck, place)
    cells = [Cell(source.shape(name), b, n) for name in shape.split(",") for b in batches for n in sizes]
    for cell in cells:
        source.check(cell.length, steps + LEAD)
        for method in ("dense", *setup.methods):
            check_steps(method, sized(method, cell.length), steps)
    facts = {
        "benchmark": "attention",
        "settings": {
            "inputs": source.describe(),
            "methods": list(setup.methods),
            "steps": steps,
            "rounds": rounds,
            "layers": layers,
            "refcheck": refcheck,
            "device": device,
            "dtype": dtype,
            "backend": resolved,
        },
        "machine": provenance.machine(),
        "versions": provenance.versions(),
    }
    finished = table.resume(out, facts)
    document: dict[str, Any] = {**facts, "command": provenance.command(), "stream_bytes_per_second": 0.0, "invalid": []}

    def measure_stream() -> float:
        return stream.stream_bandwidth() if device == "cpu" else memory.device_bandwidth(place)

    def settle() -> None:
        """Derive what follows from each cell's bandwidth, and write."""
        measured = [cell.get("stream_bytes_per_second", 0.0) for cell in document["cells"]]
        document["stream_bytes_per_second"] = max(measured, default=0.0)
        document["invalid"] = [line for cell in document["cells"] for line in table.derive(cell, device)]
        if out is not None:
            write_document(out, document)

    document["cells"] = finished
    if finished:
        _common.log(f"{len(finished)} finished cells of {out} are kept")
    with _common.resumable(out), _common.progress() as report:
        for cell in cells:
            if any(table.same_cell(one, cell.shape.name, cell.batch, cell.length) for one in finished):
                continue
            try:
                found = bench_cell(cell, source, setup, report, stream=measure_stream)
            except RefcheckError as error:
                _common.log(f"refcheck failed, nothing of this cell was measured: {error}")
                raise typer.Exit(1) from None
            document["cells"] = [*document["cells"], found]
            settle()
        settle()
    if as_json:
        _common.emit_json(document)
    else:
        for one in document["cells"]:
            drawn = table.draw(one)
            if isinstance(drawn, str):  # why the cell was not run
                print(drawn)
            else:
                _common.show(drawn)
    if document["invalid"]:
        _common.log("THIS RUN IS INVALID: nothing reads memory faster than memory")
        for line in document["invalid"]:
            _common.log(f"  {line}")
        raise typer.Exit(1)
