"""``prehoc bench decode``: time per decode step on real text, stock transformers, our dense and the methods interleaved."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from prehoc.bench.memory import free_bytes
from prehoc.bench.systems import STOCK, System
from prehoc.integrations.transformers.layers import KVLayer
from prehoc.integrations.transformers.session import attach
from prehoc.packing import packable
from prehoc.selection import Method

DENSE = "dense"


def bench_decode(
    model: Any,
    token_ids: Tensor,
    context: int,
    names: Sequence[str],
    rounds: int = 6,
    steps: int = 16,
    batch: int = 1,
    backend: str | None = None,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    room: int | None = None,
) -> list[dict[str, Any]]:
    """Measure one context length and return one row a system.

    All systems decode the text's own next tokens in interleaved rounds: in each round every system runs `steps` steps, in an
    order that rotates. The first round warms up; the last is run once with the parts of a step timed, and once audited,
    neither of which enters the step times. Systems whose caches do not fit into memory together run in groups, each with
    dense attention beside it. Prompts are read once for all systems that prune them alike.

    Parameters
    ----------
    model : Module
        A transformers model.
    token_ids : Tensor
        int64 ``[1, n]`` with at least `needed` tokens; every batch row has a span of its own where they suffice.
    context : int
        Tokens of the prompt.
    names : list of str
        Systems to compare (`System.name`); ``sdpa`` and ``dense`` are always measured.
    rounds, steps : int
        Timed rounds, after one of warm-up, and decode steps in each.
    batch : int
        Sequences decoded together.
    backend : str, optional
        Kernel backend.
    seed : int
        Seed of the audit.
    progress : callable
        Called with (stage, done, total).
    room : int, optional
        Bytes that caches may take (default: seven tenths of what is free).

    Returns
    -------
    list of dict
        One row a system, stock and dense first; milliseconds, bytes per step. ``dense_step_ms`` is that of the same group.

    Raises
    ------
    ValueError
        Before anything is measured: the text is too short, a system unknown or not for this model, or not even two caches
        fit into memory.
    """
    need = needed(context, rounds, steps)
    check_tokens(token_ids.shape[1], None, context, rounds, steps)
    systems = check_systems(model, names, context, backend)
    ids = batch_rows(token_ids, need, batch)
    free = free_bytes(token_ids.device)
    if room is None and free is not None:
        packs = any(system.packs for system in systems)
        room = int(free * 0.7) - sum(layer.weight.nbytes for layer in (packable(model) if packs else ()))
    groups = _groups(systems, cache_bytes(model, batch, need), room)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        kept: System | None = None
        for group in groups:
            dense = System.of(DENSE, context)
            if kept is not None:
                dense.cache, dense.prefill = kept.cache, kept.prefill
            together = [dense if system.name == DENSE else system for system in group]
            _read_prompts(model, together, ids[:, :context], need, backend, progress)
            for turn in range(rounds + 3):
                progress(f"decode at {batch} x {context} tokens", turn, rounds + 3)
                span = ids[:, context + turn * steps : context + (turn + 1) * steps]
                shift = turn % len(together)
                for system in together[shift:] + together[:shift]:
                    kind = {0: "warm", rounds + 1: "parts", rounds + 2: "audit"}.get(turn, "timed")
                    system.decode(model, span, kind, backend, seed)
            rows += [_row(system, dense, context, batch) for system in together if system is not dense or kept is None]
            for system in group:
                system.cache = None
            kept = _back_to_the_prompt(dense, (rounds + 3) * steps)
    order = [system.name for system in systems]
    return sorted(rows, key=lambda row: order.index(row["system"]))


def _back_to_the_prompt(dense: System, tokens: int) -> System:
    """Take the decoded tokens out of the cache again: the next group starts from the same prompt."""
    if all(isinstance(layer, KVLayer) for layer in dense.cache.layers):
        dense.cache.crop(-tokens)
    else:  # what a sliding window dropped does not come back
        dense.cache = None
    return dense


def needed(context: int, rounds: int, steps: int) -> int:
    """Return the tokens of the longest cache: beside the timed rounds one of warm-up, one of parts and one audited."""
    return context + (rounds + 3) * steps


def batch_rows(token_ids: Tensor, need: int, batch: int) -> Tensor:
    """Return int64 ``[batch, need]``: a span of the text for each row, or copies of its beginning where it is too short."""
    if token_ids.shape[1] >= batch * need:
        return token_ids[0, : batch * need].view(batch, need)
    return token_ids[:, :need].expand(batch, -1)


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


def check_systems(model: Any, names: Sequence[str], context: int, backend: str | None) -> list[System]:
    """Return stock, dense and the named systems; what is unknown or does not fit the model is refused here (ValueError)."""
    systems = [System.of(name, context) for name in dict.fromkeys([STOCK, DENSE, *names])]
    check_methods(model, [system.method for system in systems if system.method is not None], backend)
    if any(system.packs for system in systems):
        packable(model)
    return systems


def check_methods(model: Any, methods: Sequence[Method | str], backend: str | None) -> None:
    """Attach every method once: what does not fit the model is refused here (ValueError)."""
    for method in methods:
        attach(model, method, audit=0, backend=backend).detach()


def cache_bytes(model: Any, batch: int, columns: int) -> int:
    """Return the bytes of keys and values of a cache of `columns` columns."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * batch * heads * columns * dim * model.dtype.itemsize)


def _groups(systems: list[System], cache: int, room: int | None) -> list[list[System]]:
    """Divide the systems so that the caches of a group, dense always one of them, fit into `room` bytes."""
    most = len(systems) if room is None else room // cache
    if most < 2:
        raise ValueError(
            f"two caches of {cache / 2**30:.1f} GiB do not fit into the {(room or 0) / 2**30:.1f} GiB at hand; give a smaller "
            "batch or a shorter context"
        )
    dense = next(system for system in systems if system.name == DENSE)
    others = [system for system in systems if system is not dense]
    if len(systems) <= most:
        return [systems]
    return [[dense, *others[i : i + most - 1]] for i in range(0, len(others), most - 1)]


def _read_prompts(
    model: Any,
    systems: list[System],
    ids: Tensor,
    capacity: int,
    backend: str | None,
    progress: Callable[[str, int, int], None],
) -> None:
    have: dict[object, System] = {}
    for number, system in enumerate(systems):
        progress(f"prefill of {ids.shape[0]} x {ids.shape[1]} tokens", number, len(systems))
        twin = have.setdefault(system.prefill_key(), system)
        if twin is not system:
            system.copy_prompt(twin)
        elif system.cache is None:
            system.read_prompt(model, ids, capacity, backend)


def _row(system: System, dense: System, context: int, batch: int) -> dict[str, Any]:
    times = sorted(system.steps)
    row: dict[str, Any] = {
        "system": system.name,
        "context": context,
        "batch": batch,
        "prefill_seconds": system.prefill,
        "prefill_of": system.prefill_of,
        "step_ms": statistics.median(times) * 1e3,
        "step_ms_10": times[len(times) // 10] * 1e3,
        "step_ms_90": times[-1 - len(times) // 10] * 1e3,
        "dense_step_ms": statistics.median(dense.steps) * 1e3,
        "steps": len(times),
        "cache_bytes": system.cache_bytes(),
    }
    if system.method is None:
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
    }
    return row
