"""The audit: a seeded random share of decode triples is scored in full, because a shared step cannot know what it missed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from prehoc.books import Books
from prehoc.kernels.host import group_queries
from prehoc.selection import Decision, Selection, Step, Window


class Auditor:
    """Draw (step, layer, row, head) triples at a fixed rate and measure their retained mass exactly.

    Parameters
    ----------
    rate : float
        Share of the triples to audit, in [0, 1].
    seed : int
        Seed of the draw.
    """

    def __init__(self, rate: float, seed: int) -> None:
        self.rate = rate
        self._random = np.random.default_rng(seed)

    def sample(self, step: Step, decision: Decision, books: Books) -> None:
        """Audit this layer's drawn heads; triples that retain everything (dense, covered with nothing hidden) are not."""
        chosen = decision.selection
        if chosen is None:
            return
        b, h = step.q.shape[:2]
        hs = chosen.lengths.shape[1] if isinstance(chosen, Selection) else step.k.shape[1]
        drawn = np.flatnonzero(self._random.random(b * hs) < self.rate)
        for pair in drawn.tolist():
            row, head = divmod(pair, hs)
            covered = isinstance(chosen, Selection) and bool(decision.counted) and not decision.counted[row]
            if covered and not step.masked[row]:
                continue
            weights = head_weights(step, row, head, hs)  # [G, n - pad]
            books.audit(row, _retained(weights, step, row, head, chosen).mean())


def head_weights(step: Step, row: int, head: int, selection_heads: int) -> Tensor:
    """Return the exact attention weights float32 ``[G, n - pad]`` of one selection head's queries over all real columns."""
    q = group_queries(step.q, selection_heads, step.k.shape[1])[row, head].float()
    kv = head * step.k.shape[1] // selection_heads
    return torch.softmax(q @ step.k[row, kv, step.rows.pad[row] :].float().mT * step.scale, -1)


def _retained(weights: Tensor, step: Step, row: int, head: int, chosen: Selection | Window) -> Tensor:
    """Return float32 ``[G]``: the weight of the keys that were read."""
    pad = step.rows.pad[row]
    if isinstance(chosen, Window):
        start = chosen.start[row]
        if start <= pad + chosen.sink:
            return weights.sum(-1)
        return weights[:, : chosen.sink].sum(-1) + weights[:, start - pad :].sum(-1)
    columns = chosen.indices[row, head].long()
    read = torch.where(columns >= 0, weights[:, (columns - pad).clamp(min=0)], 0.0)
    return read.sum(-1)
