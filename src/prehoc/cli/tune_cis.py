"""``prehoc tune cis``: what each key of CIS reads, saves and misses."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated

import typer

from prehoc import provenance
from prehoc.cli import _common
from prehoc.files import check_writable


def command(
    text_file: Annotated[list[Path], typer.Option("--text-file", help="A text; repeat it for several.")],
    out: Annotated[Path, typer.Option("--out", help="JSON file to write; an existing one is replaced.")],
    model: _common.Model = "smollm2-135m-instruct",
    windows: Annotated[
        int, typer.Option("--windows", min=0, help="Windows in all, equally many per text (0: one each).")
    ] = 0,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="P: tokens that are prefilled.")] = 3072,
    steps: Annotated[int, typer.Option("--steps", min=1, help="S: tokens that are decoded.")] = 96,
    method: Annotated[str, typer.Option("--method", help="The CIS that is varied, such as cis:gate=query.")] = "cis",
    budgets: Annotated[str, typer.Option("--budgets", help="Keys per head, separated by commas.")] = "128,512",
    vary: Annotated[
        str,
        typer.Option(
            "--vary",
            help="Only settings that vary these, separated by commas: block_size, tau, gate (the other), no gate, dilate, "
            "retrieval, ...",
        ),
    ] = "",
    layer_stride: Annotated[int, typer.Option("--layer-stride", help="Replay every n-th full-attention layer.")] = 1,
    plot: Annotated[Path | None, typer.Option("--plot", help="Picture to write (png, svg or pdf).")] = None,
    dtype: _common.Dtype = "float32",
    backend: _common.Backend = None,
    threads: _common.Threads = None,
    as_json: _common.Json = False,
) -> None:
    """Sweep block size, gate, dilation and readings of CIS over recorded queries and keys, dense and oracle beside them.

    Each window is decoded densely once; every setting then chooses on the same queries and keys. Finished windows are
    kept in FILE.part.jsonl: an interrupted run goes on where it was.
    """
    sizes = _budgets(budgets)
    for target in (out, plot):
        if target is not None:
            check_writable(target)
    if plot is not None:
        from prehoc.plot.cis import check_target

        check_target(plot)
    from prehoc import kernels, models
    from prehoc.cli._prompt import Reader
    from prehoc.config import check_int, default_backend
    from prehoc.eval.cis_sweep import choose_layers, identity, run, settings, table
    from prehoc.eval.windows import cut_windows, read_texts
    from prehoc.files import write_document
    from prehoc.integrations.transformers.support import layer_kinds
    from prehoc.trace import check_request

    rows = settings(sizes, [key.strip() for key in vary.split(",") if key.strip()], method)
    check_int("layer_stride", layer_stride, 1)
    count = windows or len(text_file)
    texts = read_texts(text_file, count)
    _common.check_backend(backend)
    _common.setup(threads)
    part = out.with_suffix(".part.jsonl")
    with _common.resumable(part), _common.progress() as report:
        reader = Reader.before_weights(model, dtype, report)
        check_request(reader.positions, prompt_tokens + steps, prompt_tokens, steps)
        cut = cut_windows(reader.tokenizer, texts, count, prompt_tokens + steps)
        loaded, _ = models.load(model, dtype=dtype, progress=report)
        layers = choose_layers(layer_kinds(loaded), layer_stride)
        facts = {
            "model": provenance.hide_folders(model),
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "backend": kernels.resolve(backend or default_backend(), next(loaded.parameters()).device),
            "texts": cut.texts,
            "prompt_tokens": prompt_tokens,
            "steps": steps,
            "budgets": sizes,
            "layers": layers,
            "windows": len(cut.places),
            "places": cut.places,
        }
        request = hashlib.sha256(json.dumps([facts, [identity(row) for row in rows]]).encode()).hexdigest()
        found = run(loaded, cut.tokens, prompt_tokens, steps, rows, layers, part, request, report, backend=backend)
    facts["interval"] = (
        "95 % bootstrap over n (window, layer, head) means: heads and windows vary, steps are correlated"
    )
    document = {
        "command": provenance.command(),
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        **facts,
        "rows": found,
    }
    write_document(out, document)
    part.unlink(missing_ok=True)
    if plot is not None:
        from prehoc.plot.cis import draw

        draw(document, plot)
    if as_json:
        _common.emit_json(document)
        return
    for size in sizes:
        print(f"budget {size}\n{table(found, size)}\n")
    print(f"written to {out}")


def _budgets(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"budgets={text!r} is not a list of numbers; write for example 128,512") from None
    return sizes
