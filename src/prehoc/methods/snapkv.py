"""SnapKV: the last queries of the prompt say which of its keys are kept; the others are evicted before the first new token."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from prehoc.cache import KVStore
from prehoc.config import DEFAULT_LOCAL, Budget, check_int
from prehoc.methods._eviction import Evictor, always_kept, attention_sums, best_columns, total
from prehoc.selection import Decision, State, Step


@dataclasses.dataclass(frozen=True)
class SnapKV(Evictor):
    """Keep of a prompt its last `local` keys and those that its last `local` queries attend to most; add every new key.

    Source: arXiv 2404.14469. The budget is what is left of the prompt; the cache grows by one key a step from there. A later turn
    is observed and cut in the same way, together with what was left.

    Parameters
    ----------
    budget, ratio, critical
        The size, as in `prehoc.config.Budget`; ratio 1/8, at least 256 keys, when none is given.
    sink : int
        First keys that are always kept.
    local : int
        Queries of the observation window, and the last keys of the prompt that are always kept.
    kernel : int
        Keys over which the attention is averaged before the best are chosen: their neighbours come along. Odd.

    Raises
    ------
    ValueError
        When the sizes contradict each other or are too small, or the kernel is even.
    """

    name: ClassVar[str] = "snapkv"

    budget: int | None = None
    ratio: float | None = None
    critical: int | None = None
    sink: int = 0
    local: int = DEFAULT_LOCAL
    kernel: int = 5

    def __post_init__(self) -> None:
        self.size()
        check_int("kernel", self.kernel, 1)
        if self.kernel % 2 == 0:
            raise ValueError(
                f"kernel={self.kernel} must be odd: a key stands in the middle of its neighbours; 5 is usual"
            )

    @functools.cached_property
    def _size(self) -> Budget:
        return Budget.of(self.budget, self.ratio, self.critical, None, self.sink, self.local)

    def size(self) -> Budget:
        """Return the budget."""
        return self._size

    def sees(self) -> Hashable:
        """Return what decides the notes: the window of queries."""
        return self.name, self.local

    def _note(self, q: Tensor, k: Tensor, first: tuple[int, ...], scale: float, notes: State) -> None:
        window = q[:, :, -self.local :]
        if "window" in notes and window.shape[2] < self.local:
            window = torch.cat([notes["window"], window], 2)[:, :, -self.local :]
        notes["window"] = window.clone()  # not a view: the whole prompt's queries would stay in memory

    def _shrink(self, store: KVStore, step: Step, text: int) -> None:
        window = store.notes.pop("window")  # [B, H, W, D]
        sizes = [total(self.size(), prompt) + 1 for prompt in step.rows.prompt]  # and the first new key
        first = step.rows.pad if store.first is None else store.first
        if all(store.length - begin <= size for begin, size in zip(first, sizes, strict=True)):
            return
        prompt = store.length - 1
        sums = attention_sums(window, store.views()[0][:, :, :prompt], first, step.scale)  # [B, Hkv, prompt]
        score = sums.new_zeros((*sums.shape[:2], store.length))
        for row, begin in enumerate(first):
            end = max(prompt - self.local, begin)
            if end > begin:
                observed = sums[row, :, begin:end]
                score[row, :, begin:end] = F.avg_pool1d(observed, self.kernel, 1, self.kernel // 2)
        always = always_kept(store.columns(), step.rows.pad, text, self.size(), self.local + 1)
        store.evict(*best_columns(score, always, first, sizes))

    def _attend(self, store: KVStore, step: Step, text: int, pad: tuple[int, ...]) -> Decision:
        return Decision(None)
