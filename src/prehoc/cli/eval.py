"""``prehoc eval``: what methods cost in answers, on tasks, dense beside every row."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prehoc.cli import _common

if TYPE_CHECKING:
    from prehoc.eval.tasks import Loaded, Task
    from prehoc.selection import Method


def command(
    model: _common.Model,
    tasks: Annotated[
        str,
        typer.Option(
            "--tasks",
            help="Separated by commas: gsm8k, gsm8k_chat, coqa, wikitext, longbench (16 tasks) or longbench_NAME, longbench2, "
            "longbench2_cot, ruler (13 tasks) or ruler_NAME, niah, passkey, kv_retrieval, kv_retrieval_140.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", help="Folder of the run; the same command again goes on where it was interrupted.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", help="Folder with the data in the official formats; PREHOC_DATA or the hub if not given."
        ),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            "--methods", help="Separated by spaces: 'oracle:budget=128 cis:budget=128'; dense is always there."
        ),
    ] = "cis cpe",
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Samples a task, drawn with the seed; more contain fewer.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option("--length", min=16, help="Tokens of generated prompts (4096) and of text windows (2048)."),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            "--max-length",
            min=16,
            help="Tokens of prompt and answer together; a longer document loses its middle. The model's positions if not given.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Samples read and decoded together.")] = 1,
    decode_question: Annotated[
        bool,
        typer.Option(
            "--decode-question",
            help="Prefill the document only and feed the question as decode steps: no prefill then sees the question, and "
            "methods that act in decode are at work even where answers are short.",
        ),
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at a malformed data row instead of leaving it out.")
    ] = False,
    audit: Annotated[
        float, typer.Option("--audit", help="Share of decode triples (step, layer, head) whose mass is measured.")
    ] = 0.01,
    dtype: _common.Dtype = "auto",
    backend: _common.Backend = None,
    threads: _common.Threads = None,
    seed: _common.Seed = 0,
    pack: _common.Pack = False,
    as_json: _common.Json = False,
) -> None:
    """Evaluate methods on tasks: scores with intervals, the paired difference to dense, and what was read.

    Every prompt is prefilled once for all methods that share its prefill. Each finished sample is a line in OUT/TASK.jsonl;
    the tables are in OUT/summary.json. A table without a plausible dense row is not printed.
    """
    from prehoc import config, kernels
    from prehoc.eval.tasks import Source, choose

    chosen = parse_methods(methods)
    wanted = choose(tasks)
    config.check_range("audit", audit, 0.0, 1.0, fix="0.01 audits one triple in a hundred")
    _common.check_backend(backend)
    folder = data if data is not None else config.data_dir()
    if folder is not None and not folder.is_dir():
        raise ValueError(f"the data folder {str(folder)!r} does not exist; give an existing one with --data")
    _common.setup(threads, seed)

    import prehoc
    from prehoc import models, provenance
    from prehoc.cli import _answers
    from prehoc.cli._prompt import Reader
    from prehoc.eval.engine import Engine
    from prehoc.eval.prompts import Encoder
    from prehoc.eval.results import Results
    from prehoc.eval.runner import How, TaskRun, encode_samples
    from prehoc.eval.summary import summarise
    from prehoc.eval.tasks import Context
    from prehoc.files import write_document
    from prehoc.methods import describe, every_key

    _answers.quiet()
    with _common.resumable(out), _common.progress() as report:
        reader = Reader.before_weights(model, dtype, report)
        if max_length is not None and reader.positions is not None and max_length > reader.positions:
            raise ValueError(f"--max-length {max_length} exceeds the model's {reader.positions} positions; give less")
        most = max_length or reader.positions
        if length is not None and most is not None and length > most:
            raise ValueError(f"--length {length} exceeds the {most} tokens that are allowed; give less")
        encoder = Encoder(reader.tokenizer, most)
        context = Context(Source(folder), encoder, limit, length, seed)
        report("reading the data", 0, 0)
        ready = _load(wanted, context, strict)
        items = [encode_samples(encoder, task, loaded, decode_question) for task, loaded in ready]
        net, _ = models.load(model, dtype=dtype, progress=report)
        for method in chosen:  # what does not fit this model is found before the first answer
            prehoc.attach(net, method, backend=backend, audit=audit).detach()
        how = How(_ends(net, reader.tokenizer), decode_question, batch, seed)
        engine = Engine(net, backend, audit)
        runs = [
            TaskRun(engine, reader.tokenizer, task, some, chosen, how)
            for (task, _), some in zip(ready, items, strict=True)
        ]
        identity = {
            "model": provenance.hide_folders(model),
            "dtype": str(net.dtype).removeprefix("torch."),
            "backend": kernels.resolve(backend or config.default_backend(), net.device, net.dtype),
            "decode_question": decode_question,
            "max_length": most,
            "length": length,
            "seed": seed,
            "audit": audit,
            "versions": provenance.versions(),
            "chat_template_sha256": hashlib.sha256(str(reader.tokenizer.chat_template).encode()).hexdigest(),
        }
        about = {
            "machine": provenance.machine(),
            "chat_template": reader.tokenizer.chat_template,
            "stop_ids": sorted(how.eos),
            "truncation": "the middle of the document is left out",
            "decoding": "greedy",
            "tasks": {task.name: _about(task, loaded) for task, loaded in ready},
        }
        keys = {describe(method): every_key(method) for method in chosen}
        if pack:  # rounds otherwise
            identity["packed"] = True
        tables = []
        with (
            prehoc.packed(net) if pack else contextlib.nullcontext(),
            Results(out, identity, keys, about).opened() as results,
        ):
            for run in runs:
                lines = run.run(results, report)
                tables.append(summarise(run.task, chosen, lines, decode_question=decode_question))
            document = {"command": provenance.command(), **identity, **about, "tables": tables}
            write_document(out / "summary.json", document)
    if as_json:
        _common.emit_json(document)
    else:
        from prehoc.cli._eval_table import show

        for table, (task, _) in zip(tables, ready, strict=True):
            show(table, task)
    refused = [f"{table['task']}: {table['refused']}" for table in tables if table["refused"]]
    if refused:
        raise ValueError(f"refused to print {len(refused)} of {len(tables)} tables: " + "; ".join(refused))


def parse_methods(text: str) -> list[Method]:
    """Return the methods of a text, dense first: separated by spaces, or by commas where no key is given.

    Raises
    ------
    ValueError
        As `prehoc.methods.parse_method`.
    """
    from prehoc.methods import Dense, parse_method

    names = [name for word in text.split() for name in ([word] if "=" in word else word.split(",")) if name]
    return list(dict.fromkeys([Dense(), *map(parse_method, names)]))


def _load(wanted: list[tuple[Task, bool]], context: Any, strict: bool) -> list[tuple[Task, Loaded]]:
    """Return the tasks that have data with their samples; say what is left out."""
    from prehoc.eval.tasks import MissingData

    ready = []
    for task, named in wanted:
        try:
            loaded = task.load(context)
        except MissingData as error:
            if named:
                raise
            _common.log(f"{task.name} is left out: {error}")
            continue
        for fault in loaded.faults:
            if strict:
                raise ValueError(f"malformed row in {fault}; correct it, or leave --strict out to go on without it")
            _common.log(f"left out a malformed row of {task.name}: {fault}")
        if not loaded.samples:
            raise ValueError(f"{task.name} has no sound row; look at its data")
        ready.append((task, loaded))
    if not ready:
        raise ValueError("no task of --tasks has its data in the folder; give another with --data")
    return ready


def _about(task: Task, loaded: Loaded) -> dict[str, Any]:
    return {
        "samples": len(loaded.samples),
        "new_tokens": task.new_tokens,
        "stop": list(task.stop),
        "chat": task.chat,
        "malformed": [str(fault) for fault in loaded.faults],
        "notes": list(loaded.notes),
    }


def _ends(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer: of the model's generation settings and of the tokenizer."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    many = own if isinstance(own, list) else [own]
    return frozenset(int(one) for one in (*many, tokenizer.eos_token_id) if one is not None)
