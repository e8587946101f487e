"""The row of a method that evicts: it decodes on a cache of its own, which shrinks as it does in an engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prehoc import kernels
from prehoc.bench.rows import now
from prehoc.books import Books
from prehoc.cache import KVStore
from prehoc.selection import Decision, Method, Selection, State, Step, Window, attend


class EvictingRow:
    """A method whose selector runs on a store; which keys it holds follows from one query, how many from its budget.

    The queries of the prompt, by which such a method chooses, are not at hand: the time of a step does not depend on them.

    Parameters
    ----------
    name : str
        As the user wrote it.
    method : Method
        The method.
    backend : str
        Kernel backend.
    device : device
        Where it runs.
    """

    fixed = False
    extra_bytes = 0

    def __init__(self, name: str, method: Method, backend: str, device: torch.device) -> None:
        self.name, self.method, self.plan = name, method, method.plan()
        self._ops = kernels.get(backend, device)
        self._selector: Any = self.plan.selector
        self._stores: dict[int, KVStore] = {}
        self._whole: dict[int, State] = {}
        self._read: Step | None = None

    def begin(self) -> None:
        """Forget every layer's store."""
        self._stores, self._whole = {}, {}

    def skip(self, step: Step) -> None:
        """Run without looking at the clock."""
        self.run(step)

    def _store(self, step: Step) -> KVStore:
        """Return the layer's store with the newest key; a new one holds the prompt, which the method has watched."""
        if step.layer not in self._stores:
            store = self._stores[step.layer] = KVStore()
            store.append(step.k[:, :, :-1], step.v[:, :, :-1])
            store.rows = step.rows
            self._watch(step, store.notes)
        store = self._stores[step.layer]
        store.append(step.k[:, :, -1:], step.v[:, :, -1:])
        return store

    def _watch(self, step: Step, notes: State) -> None:
        self._selector.watch(step.q[:, :, None], step.k[:, :, :-1], step.rows.pad, step.scale, notes)

    def run(self, step: Step) -> tuple[Tensor, Decision, dict[str, float]]:
        """Choose, attend and evict; where the method attends itself, all of it counts as attention."""
        store, device = self._store(step), step.q.device
        begin = now(device)
        self._read, decision, _ = self._selector.run(store, step)
        between = now(device)
        out = attend(self._ops, self._read, decision.selection) if decision.out is None else decision.out
        end = now(device)
        if decision.out is not None:
            return out, decision, {"selection": 0.0, "attention": end - begin}
        return out, decision, {"selection": between - begin, "attention": end - between}

    def selected(self, step: Step, decision: Decision) -> Selection | Window | None:
        """Return the same choice over the whole cache, from a second run of the method beside the first."""
        state = self._whole.setdefault(step.layer, State())
        if not state:
            state["notes"] = State()
            self._watch(step, state["notes"])
        chosen: Selection | Window | None = self._selector.decide(step, state).selection
        return chosen

    def book(self, books: Books, step: Step, decision: Decision) -> None:
        """Enter the keys that the store held."""
        assert self._read is not None
        books.decision(self._read, step.v.shape[3], decision)
