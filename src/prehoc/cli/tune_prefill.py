"""``prehoc tune prefill``: which settings of PSAW and ETF save prefill work at no loss of quality."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prehoc import provenance
from prehoc.cli import _common
from prehoc.files import check_writable

MATMUL = {"float32": "highest", "bfloat16": "medium"}


def command(
    text_file: Annotated[list[Path], typer.Option("--text-file", help="A text; repeat it for several.")],
    out: Annotated[Path, typer.Option("--out", help="JSON file; runs already in it are kept.")],
    model: _common.Model = "smollm2-135m-instruct",
    windows: Annotated[int, typer.Option("--windows", min=1, help="Windows in all, equally many per text.")] = 16,
    window: Annotated[int, typer.Option("--window", min=3, help="Tokens of a window.")] = 2048,
    continuation: Annotated[
        int, typer.Option("--continuation", min=1, help="Its last tokens, which are decoded.")
    ] = 128,
    methods: Annotated[
        str, typer.Option("--methods", help="Methods, separated by spaces; dense is always there.")
    ] = "",
    search: Annotated[
        str, typer.Option("--search", help="psaw, etf, both, separated by spaces: search the grid of their settings.")
    ] = "",
    plot: Annotated[Path | None, typer.Option("--plot", help="Picture of the whole file (png, svg or pdf).")] = None,
    limit: Annotated[
        float, typer.Option("--limit", min=0.0, help="Largest upper end of the interval of the relative change.")
    ] = 0.01,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Windows read together.")] = 8,
    name: Annotated[str, typer.Option("--name", help="Name of this run in the file.")] = "",
    share: Annotated[
        bool, typer.Option("--share/--no-share", help="Compute the layers all settings share once.")
    ] = True,
    matmul: Annotated[
        str,
        typer.Option(
            "--matmul", help="float32, or bfloat16: round the factors of float32 products (faster, other numbers)."
        ),
    ] = "float32",
    block: Annotated[
        int,
        typer.Option(
            "--block", min=1, help="Tokens of the continuation decoded by one forward: the same numbers, faster."
        ),
    ] = 1,
    dtype: _common.Dtype = "float32",
    backend: _common.Backend = None,
    threads: _common.Threads = None,
    as_json: _common.Json = False,
) -> None:
    """Measure what pruning a prompt costs in perplexity and saves in operations, and pick a setting.

    The last --continuation tokens of each window are decoded behind the pruned prompt; the rest is the prompt. A setting
    is good when the upper end of the paired 95 % interval of the relative change of continuation perplexity is within
    --limit. Finished batches are kept in FILE.part.jsonl: an interrupted run goes on where it was.
    """
    import torch

    from prehoc import models
    from prehoc.cli._prompt import Reader
    from prehoc.config import check_choice
    from prehoc.eval.perplexity import check_lengths
    from prehoc.eval.prefill_search import add_run, read_document, run, table
    from prehoc.eval.prefill_sweep import Sweep, spell
    from prehoc.eval.windows import cut_windows, read_texts
    from prehoc.files import write_document
    from prehoc.methods import parse_method

    check_choice("matmul", matmul, tuple(MATMUL))
    wanted = [parse_method(text) for text in methods.split()]
    for method in wanted:
        spell(method)  # refuses what a prefill sweep cannot measure, before the model is loaded
    for family in search.split():
        check_choice("search", family, ("psaw", "etf", "both"))
    check_writable(out)
    if plot is not None:
        from prehoc.plot.cis import check_target

        check_target(plot)
        check_writable(plot)
    document = read_document(out)
    texts = read_texts(text_file, windows)
    _common.check_backend(backend)
    _common.setup(threads)
    before = torch.get_float32_matmul_precision()
    part = out.with_suffix(".part.jsonl")
    with _common.resumable(part), _common.progress() as report:
        reader = Reader.before_weights(model, dtype, report)
        check_lengths(reader.positions, window, continuation)
        cut = cut_windows(reader.tokenizer, texts, windows, window)
        loaded, _ = models.load(model, dtype=dtype, progress=report)
        torch.set_float32_matmul_precision(MATMUL[matmul])
        try:
            sweep = Sweep(loaded, model, cut, continuation, batch, part, block, backend, report, share)
            result = run(sweep, wanted, search.split(), limit)
        finally:
            torch.set_float32_matmul_precision(before)
    facts = {
        "name": name or f"{'+'.join(path.stem for path in text_file)} {window}",
        "command": provenance.command(),
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "model": provenance.hide_folders(model),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "matmul": matmul,
        "windows": windows,
        "window": window,
        "continuation": continuation,
        "block": block,
        "batch": batch,
        "limit": limit,
        "texts": cut.texts,
        "places": cut.places,
    }
    add_run(document, {**facts, **result})
    write_document(out, document)
    if plot is not None:
        from prehoc.plot.tune import draw

        draw(document, plot)
    if as_json:
        _common.emit_json(document)
    else:
        print(table(result))
