"""A step of CIS in one call of a native kernel, where its backend and its keys allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from prehoc.methods import _cheap, _sets
from prehoc.methods._retrieval import DILATE_SHARE, Middle
from prehoc.selection import Decision, Selection, State, Step

if TYPE_CHECKING:
    from prehoc.methods.cis import CIS

CisStep = Callable[..., tuple[Tensor, Tensor]]


def find(cis: CIS, ops: Any, middle: Middle) -> CisStep | None:
    """Return the backend's operation when it does this step: rolling refresh, no mass, no row that is covered."""
    does_it = cis.refresh == "rolling" and cis.mass is None and cis.gate in ("query", "score") and all(middle.counted)
    if cis.retrieval == "compact":
        does_it = does_it and hasattr(ops, "retrieve_compact")
    found: CisStep | None = getattr(ops, "cis_step", None) if does_it else None
    return found


def decide(cis: CIS, cis_step: CisStep, step: Step, state: State, middle: Middle, growth: int) -> tuple[Decision, int]:
    """Decide on the same state as the torch path; return the decision and the bytes of keys that were coded."""
    critical, always, compact = middle.critical, cis.sink + cis.local, cis.retrieval == "compact"
    best = tuple(keys // DILATE_SHARE if cis.dilate is None else cis.dilate for keys in critical)
    limit = tuple(max(keys - growth, 0) + always for keys in critical) if cis.matched else None
    axes = state["axes"] if cis.gate == "score" else None
    width = step.q.shape[2] if axes is None else axes.shape[3]
    longest = always + max(critical) + 2 * cis.radius * max(best) + growth + 1
    _sets.reserve(state, (*step.q.shape[:2], width), step.q.device, middle.heads, longest)
    if compact:
        _cheap.reserve(state, step)
    retrieved, cosine = cis_step(
        step.q,
        step.k,
        state,
        step.rows.pad,
        middle.start,
        cis.sink,
        cis.local,
        critical,
        best,
        limit,
        DILATE_SHARE if cis.matched and cis.dilate is None else None,
        cis.radius,
        cis.block_size,
        cis.local_window == "frozen",
        cis.tau,
        step.scale,
        axes,
        **({"rerank": cis.rerank} if compact else {}),
    )
    coded = 0
    if compact and bool(retrieved.any()):
        coded, state["coded"] = step.key_bytes(state["coded"]), step.columns
    selection = Selection(state["indices"], state["lengths"])
    decision = Decision(selection, retrieved, cosine, middle.counted, middle.scored, heads=middle.heads)
    return decision, coded
