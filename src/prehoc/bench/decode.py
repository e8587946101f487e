"""``prehoc bench decode``: time per decode step on real text, stock transformers, our dense and the methods interleaved."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import prehoc
from prehoc.books import Books, Stopwatch
from prehoc.integrations.transformers.compat import cache_key, output_cache
from prehoc.integrations.transformers.session import attach
from prehoc.trace import last_only

STOCK = "sdpa"


@dataclasses.dataclass
class System:
    """One row of the benchmark: a way to decode, with its own cache and its measurements.

    Attributes
    ----------
    name : str
        ``sdpa`` for the stock model, else a method string.
    backend : str
        Kernel backend that ran.
    prefill : list of float
        Seconds of the prompt, one per prefill.
    steps : list of float
        Seconds of every timed decode step.
    parts : dict
        Seconds of attention, selection and rest, summed over the instrumented steps.
    """

    name: str
    backend: str = ""
    cache: Any = None
    prefill: list[float] = dataclasses.field(default_factory=list)
    steps: list[float] = dataclasses.field(default_factory=list)
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    part_steps: int = 0
    books: Books = dataclasses.field(default_factory=Books)


def bench_decode(
    model: Any,
    token_ids: Tensor,
    context: int,
    methods: list[str],
    rounds: int = 6,
    steps: int = 16,
    batch: int = 1,
    backend: str | None = None,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> list[dict[str, Any]]:
    """Measure one context length and return one row a system.

    Every system prefills the same text itself, then all decode the text's own next tokens in interleaved rounds: in each
    round every system runs `steps` steps, in an order that rotates. The first round warms up; the last is run once with the
    parts of a step timed, and once audited, neither of which enters the step times.

    Parameters
    ----------
    model : Module
        A transformers model.
    token_ids : Tensor
        int64 ``[1, n]`` with at least `needed` tokens.
    context : int
        Tokens of the prompt.
    methods : list of str
        Methods to compare; the stock model and ``dense`` are always measured.
    rounds, steps : int
        Timed rounds, after one of warm-up, and decode steps in each.
    batch : int
        Copies of the text decoded together.
    backend : str, optional
        Kernel backend.
    seed : int
        Seed of the audit.
    progress : callable
        Called with (stage, done, total).

    Returns
    -------
    list of dict
        One row a system; times in milliseconds, bytes per step.

    Raises
    ------
    ValueError
        Before anything is measured: the text is too short, or a method unknown or not for this model.
    """
    need = needed(context, rounds, steps)
    check_tokens(token_ids.shape[1], None, context, rounds, steps)
    check_methods(model, methods, backend)
    ids = token_ids[:, :need].expand(batch, -1)
    systems = [System(name) for name in dict.fromkeys([STOCK, "dense", *methods])]
    with torch.inference_mode():
        for number, system in enumerate(systems):
            progress(f"prefill of {context} tokens", number, len(systems))
            _prefill(model, system, ids[:, :context], need, backend)
        for turn in range(rounds + 3):
            progress(f"decode at {context} tokens", turn, rounds + 3)
            span = ids[:, context + turn * steps : context + (turn + 1) * steps]
            shift = turn % len(systems)
            for system in systems[shift:] + systems[:shift]:
                kind = {0: "warm", rounds + 1: "parts", rounds + 2: "audit"}.get(turn, "timed")
                _decode(model, system, span, kind, backend, seed)
    return [_row(system, context, batch) for system in systems]


def needed(context: int, rounds: int, steps: int) -> int:
    """Return the tokens of the longest cache: beside the timed rounds one of warm-up, one of parts and one audited."""
    return context + (rounds + 3) * steps


def check_tokens(tokens: int, limit: int | None, context: int, rounds: int, steps: int) -> None:
    """Raise ValueError unless a text of `tokens` tokens and a model of `limit` positions are long enough."""
    need = needed(context, rounds, steps)
    why = f"context {context} and {rounds + 3} rounds of {steps} steps need {need}"
    if limit is not None and need > limit:
        raise ValueError(
            f"the model has {limit} positions, but {why}; give a shorter context, or fewer rounds or steps"
        )
    if tokens < need:
        raise ValueError(
            f"the text has {tokens} tokens, but {why}; give a longer text, a shorter context, or fewer rounds or steps"
        )


def check_methods(model: Any, methods: Sequence[str], backend: str | None) -> None:
    """Attach every method once: what is unknown or does not fit the model is refused here (ValueError)."""
    for method in ("dense", *methods):
        attach(model, method, audit=0, backend=backend).detach()


def _wait(device: torch.device) -> None:
    """Wait until the device has done what it was given, so that a clock read now is honest."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _prefill(model: Any, system: System, ids: Tensor, capacity: int, backend: str | None) -> None:
    if system.name == STOCK:
        begin = time.perf_counter()
        system.cache = output_cache(model(input_ids=ids, use_cache=True, **last_only(model)))
        _wait(ids.device)
        system.prefill.append(time.perf_counter() - begin)
        return
    with prehoc.sparsify(model, system.name, audit=0, backend=backend) as session:
        session.books = system.books
        cache = session.new_cache(capacity)
        begin = time.perf_counter()
        model(input_ids=ids, use_cache=True, **{cache_key({}, model): cache}, **last_only(model))
        _wait(ids.device)
        system.prefill.append(time.perf_counter() - begin)
        system.cache = cache


def _decode(model: Any, system: System, ids: Tensor, kind: str, backend: str | None, seed: int) -> None:
    session, key = None, cache_key({}, model)
    if system.name != STOCK:
        session = attach(model, system.name, audit=0.05 if kind == "audit" else 0, backend=backend, seed=seed)
    try:
        if session is not None:
            session.books, system.backend = system.books, session.backend
            session.stopwatch = Stopwatch(ids.device) if kind == "parts" else None
        for i in range(ids.shape[1]):
            begin = time.perf_counter()
            model(input_ids=ids[:, i : i + 1], use_cache=True, **{key: system.cache})
            _wait(ids.device)
            if kind == "timed":
                system.steps.append(time.perf_counter() - begin)
        if session is not None and session.stopwatch is not None:
            system.parts, system.part_steps = session.stopwatch.seconds, ids.shape[1]
    finally:
        if session is not None:
            session.detach()


def _row(system: System, context: int, batch: int) -> dict[str, Any]:
    times = sorted(system.steps)
    row: dict[str, Any] = {
        "system": system.name,
        "context": context,
        "batch": batch,
        "prefill_seconds": system.prefill[0],
        "step_ms": statistics.median(times) * 1e3,
        "step_ms_10": times[len(times) // 10] * 1e3,
        "step_ms_90": times[-1 - len(times) // 10] * 1e3,
        "steps": len(times),
    }
    if system.name == STOCK:
        return row
    books = system.books
    books.flush()
    traffic = books.traffic
    row |= {
        f"{part}_ms": system.parts.get(part, 0.0) / system.part_steps * 1e3
        for part in ("attention", "selection", "rest")
    }
    masses = books.audited()
    row |= {
        "backend": system.backend,
        "keys_per_head": traffic.keys_read / traffic.triples,
        "visible_per_head": traffic.keys_visible / traffic.triples,
        "bytes_per_step": traffic.bytes_read / traffic.steps,
        "dense_bytes_per_step": traffic.bytes_dense / traffic.steps,
        "retrieval_ratio": traffic.retrieval_ratio if traffic.counted_triples else None,
        "retained_mass": float(masses.mean()) if masses.numel() else None,
        "audited": masses.numel(),
        "prefill_operations": books.prefill.operations,
        "prefill_operations_dense": books.prefill.operations_dense,
        "cache_bytes": sum(layer.store.nbytes for layer in system.cache.layers if hasattr(layer, "store")),
    }
    return row
