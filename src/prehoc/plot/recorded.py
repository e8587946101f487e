"""The exact attention of a recorded layer, and what became of each of its keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prehoc.methods import parse_method
from prehoc.trace import Trace

UNSEEN, UNREAD, LOCAL, SINK, DILATED, CRITICAL, MISSED = range(7)
"""What a key is to a step; the later wins where several keys share a pixel."""


class Layer:
    """One full-attention layer of a trace that was recorded with queries and keys.

    Parameters
    ----------
    found : Trace
        Recorded with ``qk``.
    number : int
        The layer.

    Attributes
    ----------
    weights : Tensor
        float32 ``[Hs, G, S, n]`` attention with n = P + S, zero where a step does not see a key.
    mean : Tensor
        float32 ``[Hs, S, n]``, their mean over the query heads of a group.
    """

    def __init__(self, found: Trace, number: int) -> None:
        assert found.q is not None and found.k is not None
        self._found, self._number = found, number
        k = torch.from_numpy(found.k[number])  # [Hkv, n, D]
        q = torch.from_numpy(np.ascontiguousarray(found.q[:, number].swapaxes(0, 1)))  # [H, S, D]
        self._column = torch.arange(k.shape[1])
        self._seen = torch.arange(q.shape[1])[:, None] + found.meta["prompt_tokens"] + 1  # [S, 1], t of each step
        scores = q.view(k.shape[0], -1, *q.shape[1:]) @ k[:, None].mT * found.meta["scale"][str(number)]
        scores = scores.masked_fill(self._column >= self._seen, -torch.inf)  # [Hkv, G, S, n]
        self.weights = torch.softmax(scores, -1).view(found.keys.shape[2], -1, *scores.shape[2:])
        self.mean = self.weights.mean(1)

    def oracle(self) -> NDArray[np.bool_]:
        """Return bool ``[Hs, S, n]``: the critical keys of the oracle of the trace's sizes."""
        sizes = self._found.meta["oracle"]
        middle = (self._column >= sizes["sink"]) & (self._column < self._seen - sizes["local"])  # [S, n]
        rank = _ranks(self.mean, middle)
        if sizes["mass"] is None and sizes["critical"] is not None:
            return np.asarray((rank < sizes["critical"]) & middle)
        keys = torch.from_numpy(self._found.keys[:, self._number].T.astype(np.int64))  # [Hs, S]: as many as were read
        return np.asarray((rank < (keys - sizes["sink"] - sizes["local"])[..., None]) & middle)

    def kinds(self) -> NDArray[np.uint8]:
        """Return uint8 ``[Hs, S, n]``: what each key is to each step (`UNSEEN` to `MISSED`); needs the selections.

        A head's chosen keys are those of its last retrieval: the best of them that are the best of the whole middle, as many as
        the method may retrieve, are critical, the others came by dilation.
        """
        found, sizes = self._found, self._found.meta["oracle"]
        read = read_mask(found, self._number)
        out = np.where(np.asarray(self._column < self._seen), UNREAD, UNSEEN).astype(np.uint8)  # [S, n]
        out = np.broadcast_to(out, read.shape).copy()
        out[self.oracle()] = MISSED  # those that are read become something else below
        anchors = _anchors(found.retrieved[:, self._number].T)  # [Hs, S]
        total, column = np.asarray(self._seen)[:, 0], np.asarray(self._column)
        local = (
            column >= (total[anchors] - sizes["local"])[..., None]
        )  # [Hs, S, n], the window kept since the retrieval
        sink = (column < sizes["sink"]) & read
        chosen = read & ~sink & ~local
        out[chosen] = CRITICAL
        out[chosen & self._dilated(chosen, anchors)] = DILATED
        out[read & local] = LOCAL
        out[sink] = SINK
        return out

    def _dilated(self, chosen: NDArray[np.bool_], anchors: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return bool ``[Hs, S, n]``: chosen keys that no retrieval ranked high enough."""
        found, sizes = self._found, self._found.meta["oracle"]
        out = np.zeros_like(chosen)
        score = self.mean if found.meta["method"].startswith("oracle") else self._scores()
        begin = torch.from_numpy(self._hidden())[:, None].clamp(min=sizes["sink"])
        rank = np.asarray(_ranks(score, (self._column >= begin) & (self._column < self._seen - sizes["local"])))
        most = sizes["critical"] or rank.shape[-1]
        for head, step in zip(*np.nonzero(found.retrieved[:, self._number].T), strict=True):
            ranks = np.sort(rank[head, step][chosen[head, step]])[:most]
            best = int(
                (ranks == np.arange(len(ranks))).cumprod().sum()
            )  # so many of the best were taken, none left out
            out[head][anchors[head] == step] = rank[head, step] >= best
        return out

    def _hidden(self) -> NDArray[np.int64]:
        """Return int64 ``[S]``: the first column that the method's depth window shows each step."""
        name, keys = self._found.meta["method"].partition(":")[0], self._found.meta["keys"]
        window = parse_method(name, {key: value for key, value in keys.items() if value is not None}).plan().window
        masked: Callable[[int], int] | None = None
        if window is not None:
            masked = window.masked(self._number, self._found.meta["layers"])
        return np.array([masked(int(total)) if masked else 0 for total in self._seen[:, 0]], dtype=np.int64)

    def _scores(self) -> Tensor:
        """Return float32 ``[Hs, S, n]`` to rank by: the largest share over the group of what the depth window shows."""
        sink = self._found.meta["oracle"]["sink"]
        shown = (self._column < sink) | (self._column >= torch.from_numpy(self._hidden())[:, None])
        visible = self.weights * shown
        return torch.amax(visible / visible.sum(-1, keepdim=True), 1)


def read_mask(found: Trace, layer: int) -> NDArray[np.bool_]:
    """Return bool ``[Hs, S, P + S]``: the keys that each step of a layer read; needs the selections."""
    assert found.indices is not None
    columns = found.meta["prompt_tokens"] + found.meta["steps"]
    own = found.indices[:, layer].swapaxes(0, 1).astype(np.int64)  # [Hs, S, Kmax]
    out = np.zeros((*own.shape[:2], columns + 1), bool)
    np.put_along_axis(out, np.where(own < 0, columns, own), True, -1)  # padding lands in the extra column
    return out[..., :columns]


def full_layers(found: Trace) -> list[int]:
    """Return the layers that hold something: those with full attention that were recorded."""
    return [layer for layer in range(found.keys.shape[1]) if (found.keys[:, layer] >= 0).all()]


def _anchors(retrieved: NDArray[Any]) -> NDArray[np.int64]:
    """Return int64 ``[Hs, S]``: the step of each head's last retrieval, the step itself where there was none yet."""
    steps = np.arange(retrieved.shape[1])
    last = np.maximum.accumulate(np.where(retrieved, steps, -1), -1)
    return np.where(last < 0, steps, last)


def _ranks(score: Tensor, among: Tensor) -> Tensor:
    """Return int64 of `score`'s shape: the place of each key among those allowed; ties: the lower column first."""
    order = score.masked_fill(~among, -1.0).argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(score.shape[-1]).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)
