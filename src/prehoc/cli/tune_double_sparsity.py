"""``prehoc tune double-sparsity``: the label channels of Double Sparsity for any model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from prehoc import provenance
from prehoc.cli import _common
from prehoc.files import atomic_path, check_writable


def command(
    text_file: Annotated[Path, typer.Option("--text-file", help="A UTF-8 text of at least P + S tokens.")],
    out: Annotated[Path, typer.Option("--out", help="JSON file to write; an existing one is replaced.")],
    model: _common.Model = "smollm2-135m-instruct",
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="P: tokens that are prefilled.")] = 1024,
    steps: Annotated[int, typer.Option("--steps", min=1, help="S: tokens whose queries are measured.")] = 128,
    dtype: _common.Dtype = "float32",
    backend: _common.Backend = None,
    threads: _common.Threads = None,
    as_json: _common.Json = False,
) -> None:
    """Rank the channels of every KV head by the mean of abs(q k) over a text.

    Use the file with --method double_sparsity:calibration=FILE; without one, the variance of the prompt's own keys decides.
    """
    check_writable(out)
    from prehoc import models
    from prehoc.cli._prompt import Reader
    from prehoc.eval.windows import cut_windows, read_texts
    from prehoc.methods._calibrate import channel_order
    from prehoc.methods.double_sparsity import FORMAT
    from prehoc.trace import check_request

    texts = read_texts([text_file], 1)
    _common.check_backend(backend)
    _common.setup(threads)
    with _common.progress() as report:
        reader = Reader.before_weights(model, dtype, report)
        check_request(reader.positions, prompt_tokens + steps, prompt_tokens, steps)
        cut = cut_windows(reader.tokenizer, texts, 1, prompt_tokens + steps)
        loaded, _ = models.load(model, dtype=dtype, progress=report)
        order = channel_order(loaded, cut.tokens[0], prompt_tokens, steps, backend=backend, progress=report)
    document = {
        "format": FORMAT,
        "command": provenance.command(),
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "model": provenance.hide_folders(model),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "texts": cut.texts,
        "prompt_tokens": prompt_tokens,
        "steps": steps,
        "channels": order.tolist(),
    }
    with atomic_path(out) as part:
        part.write_text(json.dumps(document), encoding="utf-8")
    if as_json:
        _common.emit_json(document)
        return
    layers, heads, dimension = order.shape
    print(f"{layers} layers of {heads} KV heads with {dimension} channels each; written to {out}")
    print(f"use it with: --method double_sparsity:calibration={out}")
