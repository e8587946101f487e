"""What evicting methods share: attention sums over a prompt, the keys to keep, and one step on a cache that shrinks."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import ClassVar

import torch
from torch import Tensor

from prehoc.cache import KVStore
from prehoc.config import Budget
from prehoc.kernels.reference import ranked
from prehoc.selection import Decision, Plan, Selection, State, Step

BLOCK = 128  # queries at a time: weights of one block against all keys are the largest thing in memory


class Evictor:
    """Base of the selectors that evict: the engine shows them every prompt and lets them shrink the cache in decode.

    A method keeps what it needs from a prompt in the cache's `notes`, under ``columns`` how many columns it has seen.
    """

    granularity: ClassVar[str] = "kv_head"
    name: ClassVar[str]

    def size(self) -> Budget:
        """Return the budget."""
        raise NotImplementedError

    def plan(self) -> Plan:
        """Return a plan whose selector is this configuration."""
        return Plan(selector=self)

    def sees(self) -> Hashable:
        """Return what decides the notes taken of a prompt: methods with equal ones can decode from copies of one cache."""
        return self.name

    def _knows(self, notes: State) -> bool:
        """Return whether notes are its own, or taken of a prompt that it sees alike and from which nobody has evicted."""
        return notes.get("owner") in (self, self.sees())

    def watch(self, q: Tensor, k: Tensor, first: tuple[int, ...], scale: float, notes: State) -> None:
        """Take note of a prompt, or of one chunk of it.

        Parameters
        ----------
        q : Tensor
            ``[B, H, T, D]``, queries of the last T columns.
        k : Tensor
            ``[B, Hkv, n, D]``.
        first : tuple of int
            Per row, the first real column.
        scale : float
            Factor on q.k before the softmax.
        notes : State
            Where to keep it.
        """
        if not self._knows(notes):
            notes.clear()
            notes["owner"] = self.sees()  # whose they are is settled by who evicts
        self._note(q.detach(), k, first, scale, notes)
        notes["columns"] = k.shape[2]
        notes["prompt"] = True

    def run(self, store: KVStore, step: Step) -> tuple[Step, Decision, Tensor]:
        """Decode one token on a store that holds its key: evict what the budget asks for, before or after attention.

        Parameters
        ----------
        store : KVStore
            The cache, the newest key included.
        step : Step
            The step; its keys, values and padding are replaced by those of the store.

        Returns
        -------
        step : Step
            The step as it reads what the store held during attention.
        decision : Decision
            It reads every key that the store held.
        columns : Tensor
            int32 ``[B, Hkv, n]``, which columns of the text these keys are, in no order; without meaning before a row's first.

        Raises
        ------
        ValueError
            When the method has not seen the prompt.
        """
        notes = store.notes
        if not self._knows(notes) or notes.get("columns") != store.length - 1:
            raise ValueError(
                f"method {self.name!r} chooses by the prompt's queries, which it has not seen: attach it before the prompt is "
                "read (a recorded trace does not hold them: use prehoc trace instead of a replay)"
            )
        notes["owner"] = self
        text = store.length + store.dropped
        if notes.pop("prompt", False):
            self._shrink(store, step, text)
        first = step.rows.pad if store.first is None else store.first
        k, v = store.views()
        now = dataclasses.replace(step, k=k, v=v, rows=dataclasses.replace(step.rows, pad=first))
        gone = tuple(text - pad - (store.length - begin) for pad, begin in zip(step.rows.pad, first, strict=True))
        columns = store.columns().clone()
        decision = self._attend(store, now, text, step.rows.pad)
        decision.counted, decision.evicted = tuple(many > 0 for many in gone), gone
        notes["columns"] = store.length
        return now, decision, columns

    def decide(self, step: Step, state: State) -> Decision:
        """Return the same choice over a cache that stays whole: the eviction happens to a copy of it, kept in `state`.

        ``state["notes"]`` holds what `watch` took note of.
        """
        if "store" not in state:
            state["store"] = store = KVStore()
            store.append(step.k, step.v)
            store.rows, store.notes = step.rows, State(state.get("notes", {}))
        else:
            state["store"].append(step.k[:, :, -1:], step.v[:, :, -1:])
        now, decision, columns = self.run(state["store"], step)
        kept = torch.arange(columns.shape[2], device=columns.device) >= _rows(now.rows.pad, columns.device)
        last = torch.iinfo(torch.int32).max
        indices = torch.where(kept, columns, last).sort(-1).values
        longest = columns.shape[2] - min(now.rows.pad)
        indices = torch.where(indices < last, indices, -1)[..., :longest].contiguous()
        lengths = kept.sum(-1, dtype=torch.int32).expand(indices.shape[:2]).contiguous()
        full = len(set(now.rows.pad)) == 1
        return dataclasses.replace(decision, selection=Selection(indices, lengths, full), out=None, evicted=())

    def _note(self, q: Tensor, k: Tensor, first: tuple[int, ...], scale: float, notes: State) -> None:
        raise NotImplementedError

    def _shrink(self, store: KVStore, step: Step, text: int) -> None:
        """Evict from a prompt that has just ended, the newest key being that of the first new token."""
        raise NotImplementedError

    def _attend(self, store: KVStore, step: Step, text: int, pad: tuple[int, ...]) -> Decision:
        """Return what this step reads of the store, and evict behind it."""
        raise NotImplementedError


def total(budget: Budget, prompt: int) -> int:
    """Return the keys that a row with this prompt may hold."""
    return budget.sink + (budget.critical_for(prompt) or 0) + budget.local


def attention_sums(q: Tensor, k: Tensor, first: tuple[int, ...], scale: float) -> Tensor:
    """Return each key's attention, summed over the queries and the query heads of its group; blocks of queries at a time.

    Parameters
    ----------
    q : Tensor
        ``[B, H, T, D]``, queries of the last T columns.
    k : Tensor
        ``[B, Hkv, n, D]``.
    first : tuple of int
        Per row, the first real column.
    scale : float
        Factor on q.k before the softmax.

    Returns
    -------
    Tensor
        ``[B, Hkv, n]`` float32, or float64 for a float64 model; 0 before `first`.
    """
    b, _, tokens, d = q.shape
    hkv, n = k.shape[1], k.shape[2]
    exact = torch.promote_types(q.dtype, torch.float32)
    sums = torch.zeros((b, hkv, n), dtype=exact, device=q.device)
    keys = k.to(exact)
    begin = _rows(first, q.device)[..., None]  # [B, 1, 1, 1]
    for a in range(0, tokens, BLOCK):
        block = q[:, :, a : a + BLOCK].to(exact)
        size, end = block.shape[2], n - tokens + min(a + BLOCK, tokens)
        query = torch.arange(end - size, end, device=q.device)[:, None]  # columns, [size, 1]
        key = torch.arange(end, device=q.device)
        logits = block.reshape(b, hkv, -1, d) @ keys[:, :, :end].mT * scale  # [B, Hkv, G * size, end]
        logits = logits.view(b, hkv, -1, size, end).masked_fill(((key > query) | (key < begin))[:, :, None], -torch.inf)
        weights = torch.softmax(logits, -1).masked_fill((query < begin)[:, :, None], 0.0)
        sums[:, :, :end] += weights.sum((2, 3))
    return sums


def best_columns(
    score: Tensor, always: Tensor, first: tuple[int, ...], sizes: list[int]
) -> tuple[Tensor, tuple[int, ...]]:
    """Return the columns to keep: those that always stay and those with the best scores, in their order.

    Parameters
    ----------
    score : Tensor
        ``[B, Hkv, n]``.
    always : Tensor
        bool, as `score` or so that it expands to it.
    first : tuple of int
        Per row, the first real column.
    sizes : list of int
        Keys to keep of each row; a row that has no more keeps all.

    Returns
    -------
    keep : Tensor
        int64 ``[B, Hkv, K]``, ascending; equal scores: the lower column stays.
    first : tuple of int
        Per row, the leading entries of `keep` that stand for nothing.
    """
    b, hkv, n = score.shape
    sizes = [min(size, n - begin) for size, begin in zip(sizes, first, strict=True)]
    widest = max(sizes)
    score = score.float().masked_fill(always, torch.inf)
    keep = torch.zeros((b, hkv, widest), dtype=torch.int64, device=score.device)
    for row, (size, begin) in enumerate(zip(sizes, first, strict=True)):
        keep[row, :, widest - size :] = ranked(score[row, :, begin:], size).sort(-1).values + begin
    return keep, tuple(widest - size for size in sizes)


def always_kept(columns: Tensor, pad: tuple[int, ...], text: int, budget: Budget, local: int) -> Tensor:
    """Return bool like `columns` (int32 ``[B, Hkv, n]``): sinks, and the last `local` columns of the text."""
    return (columns < _rows(pad, columns.device) + budget.sink) | (columns >= text - local)


def _rows(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return int64 ``[B, 1, 1]``."""
    return torch.tensor(values, device=device).view(-1, 1, 1)
