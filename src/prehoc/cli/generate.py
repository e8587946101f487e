"""``prehoc generate``: ask about a long text and see what the answer cost."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prehoc.cli import _common
from prehoc.files import read_text

if TYPE_CHECKING:
    from prehoc.cli._answers import Answer, Settings


def command(
    model: _common.Model,
    prompt_file: Annotated[str, typer.Option("--prompt-file", help="Text file (UTF-8) to read.")],
    ask: Annotated[
        str, typer.Option("--ask", help="Question about the text; without one the text is the prompt.")
    ] = "",
    method: Annotated[
        str, typer.Option("--method", help="name or name:key=value,key=value; for example cpe, cis, dense.")
    ] = "cpe",
    budget: Annotated[
        int | None,
        typer.Option(
            "--budget", help="Keys to read per head and step; an eighth of the prompt, at least 256, if not given."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Another key of the method; may be repeated.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            help="Also answer with this method (a whole one: cis:budget=64) first and show both side by side.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", help="0: the likeliest token; above: sampling.")] = 0.0,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut the middle out of a text that is too long for the model.")
    ] = False,
    audit: Annotated[
        float, typer.Option("--audit", help="Share of decode triples (step, layer, head) whose mass is measured.")
    ] = 0.01,
    device: _common.Device = "cpu",
    dtype: _common.Dtype = "auto",
    backend: _common.Backend = None,
    threads: _common.Threads = None,
    seed: _common.Seed = 0,
    pack: _common.Pack = False,
    as_json: _common.Json = False,
) -> None:
    """Answer a question about a text file, reading few keys, and report what was read and what was missed.

    A model with a chat template gets the text and then the question as one user turn; a base model gets them as plain
    text. With --compare dense the same prompt is answered twice and both are shown side by side.
    """
    from prehoc import config
    from prehoc.cli._answers import Settings
    from prehoc.methods import parse_method, parse_pairs

    text, _ = read_text(prompt_file)
    extra: dict[str, Any] = dict(parse_pairs(settings or []))
    if budget is not None:
        if "budget" in extra:
            raise ValueError(
                f"--budget {budget} and --set budget={extra['budget']} both set the budget; give one of them"
            )
        extra["budget"] = budget
    methods = [parse_method(method, extra)]
    if compare is not None:
        methods.insert(0, parse_method(compare))
    if not 0 <= temperature < math.inf:
        raise ValueError(f"--temperature {temperature} must be 0 (greedy) or a positive number")
    config.check_range("audit", audit, 0.0, 1.0, fix="0.01 audits one triple in a hundred")
    _common.check_device(device)
    _common.check_backend(backend, device)
    how = Settings(max_new_tokens, temperature, backend, audit, seed, pack)
    _common.setup(threads)
    run(model, dtype, text, ask, methods, how, device=device, truncate=truncate, as_json=as_json)


def run(
    model: str,
    dtype: str,
    text: str,
    ask: str,
    methods: list[Any],
    how: Settings,
    *,
    device: str = "cpu",
    truncate: bool = False,
    as_json: bool = False,
    about: dict[str, Any] | None = None,
) -> None:
    """Read, check, load and answer; one method streams its answer, two are shown side by side.

    Parameters
    ----------
    model, dtype, device
        As for `prehoc.models.load`.
    text, ask : str
        The document and the question.
    methods : list of Method
        One method, or the one to compare with and then the method.
    how : Settings
        How to generate.
    truncate, as_json : bool
        The command's options.
    about : dict, optional
        More facts for the JSON document.
    """
    import prehoc
    from prehoc import models
    from prehoc.cli import _answers
    from prehoc.cli._prompt import Reader

    _answers.quiet()
    answers = []
    with contextlib.ExitStack() as layers:
        with _common.progress() as report:
            reader = Reader.before_weights(model, dtype, report)
            ids, cut = reader.fit(text, ask, how.new_tokens, truncate)
            loaded, tokenizer = models.load(model, dtype, device=device, progress=report)
            report("preparing", 0, 0)
            if how.pack:
                layers.enter_context(prehoc.packed(loaded))
            for method in methods:  # what does not fit this model is found before the first answer
                prehoc.attach(loaded, method, backend=how.backend, audit=how.audit).detach()
            _answers.warm_up(loaded, ids, how)
        if cut:
            _common.log(f"{cut} of {len(text)} characters were left out of the middle of the text")
        for method in methods:
            stream = len(methods) == 1 and not as_json
            with _watch(method.name, len(ids), how.new_tokens, tokenizer if stream else None) as told:
                answers.append(_answers.answer(loaded, tokenizer, ids, method, how, told))
    if as_json:
        _common.emit_json(_document(model, loaded, len(ids), cut, ask, how, answers, about or {}))
    elif len(answers) == 1:
        print(f"\n{answers[0].report}")
        print(f"first token      {answers[0].first_token_seconds:.2f} s, then {_rate(answers[0])}")
    else:
        from rich.console import Console

        _answers.show(answers, Console(highlight=False))


def _rate(one: Answer) -> str:
    return "nothing" if one.decode_rate is None else f"{one.decode_rate:.1f} tokens/s"


@contextlib.contextmanager
def _watch(name: str, prompt: int, new_tokens: int, tokenizer: Any = None) -> Iterator[Any]:
    """Show progress on stderr, and with a tokenizer the answer on stdout as it comes; yields what to call with a token."""
    with contextlib.ExitStack() as stack:
        report = stack.enter_context(_common.progress())
        report(f"{name}: reading {prompt} tokens", 0, 0)
        if tokenizer is None:
            done = 0

            def count(token: Any) -> None:
                nonlocal done
                done += 1
                report(f"{name}: answering", done, new_tokens)

            yield count
            return
        from transformers import TextStreamer

        printer = TextStreamer(tokenizer, skip_special_tokens=True)
        started = False

        def write(token: Any) -> None:
            nonlocal started
            if not started:  # bars and text cannot share a terminal
                started = True
                stack.close()
            printer.put(token)

        yield write
        printer.end()
        sys.stdout.flush()


def _document(
    model: str,
    loaded: Any,
    prompt_tokens: int,
    cut: int,
    ask: str,
    how: Settings,
    answers: list[Answer],
    about: dict[str, Any],
) -> dict[str, Any]:
    import dataclasses

    from prehoc import provenance
    from prehoc.cli._answers import agreement

    return {
        "model": provenance.hide_folders(model),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": loaded.device.type,
        "command": provenance.command(),
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        **about,
        "ask": ask,
        "prompt_tokens": prompt_tokens,
        "characters_left_out": cut,
        "settings": dataclasses.asdict(how),
        "answers": [one.to_dict() for one in answers],
        "tokens_in_common": agreement(*answers) if len(answers) == 2 else None,
    }
