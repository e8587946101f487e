"""``prehoc demo``: a real model reads a long real text twice, with every key and with few."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from prehoc.cli import _common

MODEL = "smollm2-135m-instruct"
MODULE, TOPIC = "pydoc_data.topics", "string-methods"
"""The text: what Python's own ``help("STRINGMETHODS")`` shows, from a module of the standard library that is on every
machine which runs this. It has 6.3 thousand tokens in Python 3.11 to 3.13."""
ASK = "What does str.splitlines() return?"


def command(
    budget: Annotated[int, typer.Option("--budget", help="Keys to read per head and step.")] = 1024,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Most tokens to generate.")] = 40,
    backend: _common.Backend = None,
    threads: _common.Threads = None,
    seed: _common.Seed = 0,
    as_json: _common.Json = False,
) -> None:
    """Fetch a small model, let it read a long text and answer a question, dense and with CPE side by side.

    The model is SmolLM2-135M-Instruct, the text is a chapter of Python's manual that the standard library brings along,
    so the demo needs no file, no account and no GPU.
    """
    import platform

    from prehoc import CPE, Dense
    from prehoc.cli._answers import Settings
    from prehoc.cli.generate import run

    methods: list[Any] = [Dense(), CPE(budget=budget)]
    text = document()
    _common.check_backend(backend)
    _common.setup(threads)
    python = platform.python_version()
    _common.log(f"{MODEL} reads {TOPIC!r} of {MODULE} (Python {python}, {len(text)} characters) once per method.")
    _common.log(f"Question: {ASK}")
    _common.log("This is one run after another on a machine that may have other work: prehoc bench measures speed.")
    how = Settings(max_new_tokens, backend=backend, audit=0.02, seed=seed)
    about = {"document": {"module": MODULE, "topic": TOPIC, "python": python, "characters": len(text)}}
    run(MODEL, "auto", text, ASK, methods, how, as_json=as_json, about=about)


def document() -> str:
    """Return the demo's text.

    Raises
    ------
    ValueError
        When this Python comes without it.
    """
    import importlib

    try:
        text: str = importlib.import_module(MODULE).topics[TOPIC]
    except (ImportError, KeyError) as error:
        raise ValueError(
            f"this Python comes without {TOPIC!r} in {MODULE}; use prehoc generate with a text file of your own"
        ) from error
    return text
