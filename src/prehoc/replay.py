"""Run other methods over the queries and keys of a recorded trace: no forward of the model, many settings at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from prehoc import books
from prehoc.methods import describe
from prehoc.recorder import Exact, TraceRecorder
from prehoc.report import without_nan
from prehoc.selection import Method, Plan, Rows, State, Step, decide
from prehoc.trace import Trace


@dataclasses.dataclass
class _Run:
    """One method at work."""

    method: Method
    plan: Plan
    granularity: str
    recorder: TraceRecorder
    books: books.Books
    state: State


@torch.no_grad()
def replay(
    found: Trace,
    methods: Mapping[str, Method],
    *,
    layers: Sequence[int] | None = None,
    record: tuple[str, ...] = (),
    backend: str = "auto",
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Trace]:
    """Decide with every method at every step of a trace, as an observed decode would.

    Parameters
    ----------
    found : Trace
        Recorded with ``observe=True, record=("qk",)``: replays equal decodes only if nothing was pruned.
    methods : mapping of str to Method
        Any names. Token freezing changes nothing here: an observed prefill is dense.
    layers : sequence of int, optional
        The layers to replay (default: all with full attention); the others are left empty.
    record : tuple of {"selections"}
        As in `prehoc.trace.trace`.
    backend : str
        Kernel backend.
    progress : callable, optional
        Called as ``progress(stage, done, total)`` after every layer.

    Returns
    -------
    dict of str to Trace
        Under the names of `methods`.

    Raises
    ------
    ValueError
        When the trace lacks queries and keys, was not observed, or has no such layer.
    """
    if found.q is None or found.k is None:
        raise ValueError("the trace has no queries and keys; record it with --observe --record qk")
    if not found.meta["observe"]:
        raise ValueError(
            "the trace was decoded sparsely, so its queries are that method's own; record it with --observe"
        )
    full = [layer for layer in range(found.meta["layers"]) if layer not in found.meta["sliding_layers"]]
    chosen = full if layers is None else list(layers)
    for layer in chosen:
        if layer not in full:
            raise ValueError(f"layer {layer} was not recorded; choose among {', '.join(map(str, full))}")
    runs = {name: _start(found, method, record) for name, method in methods.items()}
    for done, layer in enumerate(chosen):
        _replay_layer(found, layer, list(runs.values()), backend)
        if progress is not None:
            progress(f"replaying {len(runs)} settings", done + 1, len(chosen))
    return {name: _finish(found, run, chosen) for name, run in runs.items()}


def _start(found: Trace, method: Method, record: tuple[str, ...]) -> _Run:
    plan, granularity = method.plan(), getattr(method, "granularity", "kv_head")
    prompt, steps, layers = (found.meta[key] for key in ("prompt_tokens", "steps", "layers"))
    recorder = TraceRecorder(plan, prompt, steps, layers, granularity, record)
    return _Run(method, plan, granularity, recorder, books.Books(), State())


def _replay_layer(found: Trace, layer: int, runs: list[_Run], backend: str) -> None:
    assert found.q is not None and found.k is not None
    prompt, scale = found.meta["prompt_tokens"], found.meta["scale"][str(layer)]
    keys = torch.from_numpy(found.k[layer])[None]  # [1, Hkv, P + S, D]
    queries = torch.from_numpy(found.q[:, layer])  # [S, H, D]
    for run in runs:
        run.state = State()
    for number, q in enumerate(queries):
        exact: dict[tuple[str, int, int], Exact] = {}  # one scoring serves all settings of a shape
        for run in runs:
            hidden = run.plan.window.masked(layer, found.meta["layers"]) if run.plan.window else None
            total = prompt + number + 1
            masked = hidden(total) if hidden else 0
            seen = keys[:, :, :total]  # stands for the values too: they were not recorded, and no selection reads them
            step = Step(layer, q[None], seen, seen, scale, Rows((0,), (prompt,)), (masked,), backend)
            decision = decide(run.plan, step, run.state)
            run.books.decision(step, keys.shape[3], decision)
            shape = (run.granularity, run.recorder.sizes.sink, run.recorder.sizes.local)
            if shape not in exact:
                exact[shape] = run.recorder.exact(step)
            run.recorder.measure(step, decision, exact[shape])


def _finish(found: Trace, run: _Run, layers: Sequence[int]) -> Trace:
    meta: dict[str, Any] = {
        **found.meta,
        "method": describe(run.method),
        "keys": dataclasses.asdict(run.method),  # type: ignore[call-overload]
        "granularity": run.granularity,
        "oracle": dataclasses.asdict(run.recorder.sizes),
        "replayed_layers": list(layers),
        "totals": without_nan(books.as_dict(run.books)),
    }
    return Trace(meta=meta, **run.recorder.arrays())
