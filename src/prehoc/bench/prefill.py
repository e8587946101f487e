"""``prehoc bench prefill``: time to the first token and operations of a prompt, stock transformers and our dense beside."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from prehoc.bench.decode import check_methods
from prehoc.bench.rows import now
from prehoc.bench.systems import STOCK
from prehoc.books import Prefill
from prehoc.integrations.transformers.compat import cache_key
from prehoc.integrations.transformers.session import attach
from prehoc.trace import last_only


@dataclasses.dataclass
class _System:
    """One row: a way to read the prompt, with what it measured."""

    name: str
    backend: str = ""
    seconds: list[float] = dataclasses.field(default_factory=list)
    work: Prefill | None = None


def bench_prefill(
    model: Any,
    token_ids: Tensor,
    length: int,
    methods: Sequence[str],
    rounds: int = 3,
    batch: int = 1,
    backend: str | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> list[dict[str, Any]]:
    """Read a prompt with every system in interleaved rounds, after one of warm-up, and return one row a system.

    Parameters
    ----------
    model : Module
        A transformers model.
    token_ids : Tensor
        int64 ``[1, n]`` with at least `length` tokens.
    length : int
        Tokens of the prompt.
    methods : sequence of str
        Methods to compare; the stock model and ``dense`` are always measured.
    rounds : int
        Timed rounds.
    batch : int
        Copies of the text read together.
    backend : str, optional
        Kernel backend.
    progress : callable
        Called with (stage, done, total).

    Returns
    -------
    list of dict
        One row a system: seconds to the first token, operations of its layers, both against dense.

    Raises
    ------
    ValueError
        Before anything is measured: the text is too short, or a method unknown or not for this model.
    """
    check_length(token_ids.shape[1], None, length)
    check_methods(model, methods, backend)
    ids = token_ids[:, :length].expand(batch, -1)
    systems = [_System(name) for name in dict.fromkeys((STOCK, "dense", *methods))]
    with torch.inference_mode():
        for turn in range(rounds + 1):
            shift = turn % len(systems)
            for number, system in enumerate(systems[shift:] + systems[:shift]):
                progress(f"prefill of {length} tokens", turn * len(systems) + number, (rounds + 1) * len(systems))
                seconds = _read(model, system, ids, backend)
                if turn:
                    system.seconds.append(seconds)
    times = {system.name: statistics.median(system.seconds) for system in systems}
    return [_row(system, length, batch, times) for system in systems]


def check_length(tokens: int, limit: int | None, length: int) -> None:
    """Raise ValueError unless a text of `tokens` tokens and a model of `limit` positions hold a prompt of `length`."""
    if limit is not None and length > limit:
        raise ValueError(f"the model has {limit} positions, but --length asks for {length}; give a shorter one")
    if tokens < length:
        raise ValueError(
            f"the text has {tokens} tokens, but --length asks for {length}; give a longer text or a shorter length"
        )


def _read(model: Any, system: _System, ids: Tensor, backend: str | None) -> float:
    """Return the seconds until the first token is chosen."""
    session, arguments = None, {}
    if system.name != STOCK:
        session = attach(model, system.name, audit=0, backend=backend)
        system.backend = session.backend
        arguments[cache_key({}, model)] = session.new_cache(ids.shape[1])
    try:
        begin = now(ids.device)
        out = model(input_ids=ids, use_cache=True, **arguments, **last_only(model))
        out.logits[:, -1].argmax(-1)
        seconds = now(ids.device) - begin
    finally:
        if session is not None:
            session.detach()
    if session is not None:
        system.work = session.books.prefill
    return seconds


def _row(system: _System, length: int, batch: int, times: dict[str, float]) -> dict[str, Any]:
    own = sorted(system.seconds)
    row: dict[str, Any] = {
        "system": system.name,
        "length": length,
        "batch": batch,
        "seconds": times[system.name],
        "seconds_10": own[len(own) // 10],
        "seconds_90": own[-1 - len(own) // 10],
        "rounds": len(own),
        "tokens_per_second": length * batch / times[system.name],
        "times_sdpa": times[STOCK] / times[system.name],
        "times_dense": times["dense"] / times[system.name],
    }
    if system.work is not None:
        row |= {
            "backend": system.backend,
            "operations": system.work.operations,
            "operations_dense": system.work.operations_dense,
            "pairs": system.work.pairs,
            "pairs_dense": system.work.pairs_dense,
            "operations_per_second": system.work.operations / times[system.name],
        }
    return row
