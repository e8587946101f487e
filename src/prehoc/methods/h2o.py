"""H2O: a cache of fixed size that keeps the keys with the most accumulated attention, and evicts the others."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from prehoc import kernels
from prehoc.cache import KVStore
from prehoc.config import DEFAULT_LOCAL, DEFAULT_SINK, Budget
from prehoc.methods._eviction import Evictor, always_kept, attention_sums, best_columns, total
from prehoc.methods._scores import grouped_queries, hide_padding
from prehoc.selection import Decision, State, Step


@dataclasses.dataclass(frozen=True)
class H2O(Evictor):
    """Keep sinks, the last keys and the heavy hitters: those with the most attention, summed over all queries so far.

    Source: arXiv 2306.14048. The cache holds at most the budget while a step reads it; then it evicts down to one key less.

    Parameters
    ----------
    budget, ratio, critical
        The size, as in `prehoc.config.Budget`, `critical` being the heavy hitters; ratio 1/8, at least 256 keys, when none is
        given.
    sink, local : int
        First and last keys that are never evicted.

    Raises
    ------
    ValueError
        When the sizes contradict each other or are too small.
    """

    name: ClassVar[str] = "h2o"

    budget: int | None = None
    ratio: float | None = None
    critical: int | None = None
    sink: int = DEFAULT_SINK
    local: int = DEFAULT_LOCAL

    def __post_init__(self) -> None:
        self.size()

    @functools.cached_property
    def _size(self) -> Budget:
        return Budget.of(self.budget, self.ratio, self.critical, None, self.sink, self.local)

    def size(self) -> Budget:
        """Return the budget."""
        return self._size

    def _note(self, q: Tensor, k: Tensor, first: tuple[int, ...], scale: float, notes: State) -> None:
        sums = attention_sums(q, k, first, scale)  # [B, Hkv, n]
        if "sums" in notes:
            sums[..., : notes["sums"].shape[2]] += notes["sums"]
        notes["sums"] = sums

    def _shrink(self, store: KVStore, step: Step, text: int) -> None:
        sizes = [total(self.size(), prompt) for prompt in step.rows.prompt]
        first = step.rows.pad if store.first is None else store.first
        if all(store.length - begin <= size for begin, size in zip(first, sizes, strict=True)):
            return
        sums = F.pad(store.notes["sums"], (0, 1))
        always = always_kept(store.columns(), step.rows.pad, text, self.size(), self.local)
        keep, begin = best_columns(sums, always, first, sizes)
        store.notes["sums"] = sums.gather(2, keep)[..., :-1]
        store.evict(keep, begin)

    def _attend(self, store: KVStore, step: Step, text: int, pad: tuple[int, ...]) -> Decision:
        out, weights = _weigh(step)
        sums = F.pad(store.notes["sums"], (0, 1)) + weights
        held = [store.length - begin for begin in step.rows.pad]
        full = tuple(many >= total(self.size(), prompt) for many, prompt in zip(held, step.rows.prompt, strict=True))
        if any(full) and store.first is None:
            every = torch.arange(store.length, device=sums.device).expand(*sums.shape[:2], -1)
            store.evict(every, step.rows.pad)  # from here on keys leave one by one
        if any(full):
            # the token to come is one of the last `local`
            always = always_kept(store.columns(), pad, text, self.size(), self.local - 1)
            (sums,) = store.replace(_least(sums, always, step.rows.pad, store.columns()), full, sums)
        store.notes["sums"] = sums
        read = sum(held) * step.k.shape[1]
        return Decision(None, out=out, summaries=read * (sums.element_size() + 4))  # sums, and which column a key is


def _weigh(step: Step) -> tuple[Tensor, Tensor]:
    """Return attention over all keys ``[B, H, D]``, and its weights summed over each group, float32 ``[B, Hkv, n]``."""
    native = getattr(kernels.get(step.backend, step.q.device), "decode_weights", None)
    if native is not None:
        found: tuple[Tensor, Tensor] = native(step.q, step.k, step.v, step.rows.pad, step.scale)
        return found
    q = grouped_queries(step)  # [B, Hkv, G, D]
    weights = torch.softmax(hide_padding(q @ step.k.to(q.dtype).mT, step.rows.pad), -1)  # [B, Hkv, G, n]
    return (weights @ step.v.to(q.dtype)).flatten(1, 2).to(step.q.dtype), weights.sum(2)


def _least(sums: Tensor, always: Tensor, first: tuple[int, ...], columns: Tensor) -> Tensor:
    """Return int64 ``[B, Hkv]``: the slot with the least sum that may be evicted; equal sums: the later column goes."""
    slots = torch.arange(sums.shape[2], device=sums.device)
    begin = torch.tensor(first, device=sums.device).view(-1, 1, 1)
    sums = sums.masked_fill(always | (slots < begin), torch.inf)
    tied = sums == sums.amin(-1, keepdim=True)
    return torch.where(tied, columns, -1).argmax(-1)
