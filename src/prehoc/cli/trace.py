"""``prehoc trace``: record what a method reads and misses while a real text is decoded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prehoc import provenance
from prehoc.cli import _common
from prehoc.files import check_writable, read_text

if TYPE_CHECKING:
    from prehoc.trace import Trace


def command(
    model: _common.Model,
    text_file: Annotated[Path, typer.Option("--text-file", help="A UTF-8 text of at least P + S tokens.")],
    prompt_tokens: Annotated[
        int,
        typer.Option(
            "--prompt-tokens", min=1, help="P: tokens of the text that are prefilled, special tokens included."
        ),
    ],
    steps: Annotated[int, typer.Option("--steps", min=1, help="S: tokens of the text that are decoded one by one.")],
    method: Annotated[str, typer.Option("--method", help="A method as name or name:key=value,key=value.")],
    out: Annotated[Path, typer.Option("--out", help="The trace to write (npz); an existing file is replaced.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, added to the method; may be repeated.")
    ] = None,
    observe: Annotated[
        bool, typer.Option("--observe", help="Select and record, but prefill and attend densely.")
    ] = False,
    record: Annotated[
        list[str] | None,
        typer.Option(
            "--record", help="selections: the keys read; qk: queries and keys; qkv: values too. May be repeated."
        ),
    ] = None,
    dtype: _common.Dtype = "auto",
    backend: _common.Backend = None,
    threads: _common.Threads = None,
    seed: _common.Seed = 0,
    as_json: _common.Json = False,
) -> None:
    """Decode a text's own tokens and record, for every step, layer and head, the attention mass read and missed.

    Each number stands beside that of an oracle, the exact best keys of the same query at the same budget.
    """
    text, facts = read_text(text_file)
    import numpy as np

    from prehoc import models
    from prehoc.config import check_choice, check_int
    from prehoc.methods import parse_method, parse_pairs
    from prehoc.recorder import RECORDS
    from prehoc.trace import trace

    chosen = parse_method(method, parse_pairs(settings or []))
    check_int("prompt_tokens", prompt_tokens, 1)
    check_int("steps", steps, 1)
    for what in record or []:
        check_choice("record", what, RECORDS)
    check_writable(out)
    _common.check_backend(backend)
    _common.setup(threads, seed)
    with _common.progress() as report:
        network, tokenizer = models.load(model, dtype, progress=report)
        ids = token_ids(tokenizer, text)
        found = trace(
            network,
            ids,
            prompt_tokens,
            steps,
            chosen,
            observe=observe,
            record=record or (),
            backend=backend,
            seed=seed,
            progress=report,
        )
    found.tokens = np.array([tokenizer.decode([token]) for token in ids[: prompt_tokens + steps]])
    found.meta["text"] = facts
    found.meta["model"]["name"] = provenance.hide_folders(model)
    found.meta["command"] = provenance.command()
    found.save(out)
    if as_json:
        _common.emit_json({"meta": found.meta, "summary": found.summary(), "out": str(out)})
    else:
        print(table(found))
        print(f"written to {out}")


def token_ids(tokenizer: Callable[..., Any], text: str) -> list[int]:
    """Return the tokens of a whole text, the tokenizer's special tokens included."""
    ids: list[int] = tokenizer(text, verbose=False)[
        "input_ids"
    ]  # longer than the model's positions: only P + S are used
    return ids


def table(found: Trace) -> str:
    """Return the summary for a reader."""
    s, meta = found.summary(), found.meta
    visible = meta["prompt_tokens"] + (meta["steps"] + 1) / 2
    cosine = " / ".join(_number(value, 3) for value in s["consecutive_cosine"].values())
    rows = [
        ("method", meta["method"] + ("  (observed: attention was dense)" if meta["observe"] else "")),
        ("triples", f"{s['triples']}, {s['counted_triples']} with something to choose"),
        ("retrieval ratio", _number(s["retrieval_ratio"], 3)),
        ("keys read", f"{s['keys']:.1f} of {visible:.1f}"),
        ("retained mass", _number(s["retained"], 4)),
        ("oracle", f"{_number(s['oracle'], 4)}, with as many keys as were read {_number(s['oracle_equal_keys'], 4)}"),
        ("beta", f"{_number(s['beta'], 4)}, at equal keys {_number(s['beta_equal_keys'], 4)}"),
        ("overlap", f"{_number(s['overlap'], 3)} of the oracle's critical keys were read"),
        ("cosine", f"{cosine}  (10 / 50 / 90 % of consecutive queries)"),
    ]
    return "\n".join(f"{name:<16} {value}" for name, value in rows)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
