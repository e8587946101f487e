"""HShare: critical keys are shared between queries, layers and heads; which shares from which is measured once."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from prehoc.config import DEFAULT_LOCAL, DEFAULT_SINK, Budget, check_choice, check_range
from prehoc.methods._retrieval import Middle, as_selection, cover, retrieve_lists
from prehoc.selection import Decision, Plan, State, Step


@dataclasses.dataclass(frozen=True)
class HShare:
    """Retrieve at some steps, in some layers and for some heads only; all others read the keys of the most similar one.

    Source: HShare (ICLR 2025), as the PrHS paper runs it. At a row's first decode step every head of every layer retrieves, and
    the overlap of the sets says who shares from whom from then on: `layers` x `heads` x `queries` of the heads retrieve.

    Parameters
    ----------
    budget, ratio, critical
        The size, as in `prehoc.config.Budget`; ratio 1/8, at least 256 keys, when none is given.
    sink, local : int
        First and last keys that are always read; the last ones move on while a set is shared.
    layers, heads : float
        Share of the layers, and of the heads of such a layer, that retrieve for themselves, in (0, 1]; rounded to whole ones.
    queries : float
        Share of the decode steps that retrieve: every (1 / queries)-th, rounded.
    granularity : {"kv_head", "query_head"}
        What a head is: a KV head with its group, or a query head.

    Raises
    ------
    ValueError
        When a value lies outside its range or the sizes contradict each other.
    """

    name: ClassVar[str] = "hshare"
    across_layers: ClassVar[bool] = True

    budget: int | None = None
    ratio: float | None = None
    critical: int | None = None
    sink: int = DEFAULT_SINK
    local: int = DEFAULT_LOCAL
    layers: float = 3 / 4
    heads: float = 3 / 4
    queries: float = 1 / 2
    granularity: Literal["kv_head", "query_head"] = "kv_head"

    def __post_init__(self) -> None:
        self.size()
        for key in ("layers", "heads", "queries"):
            check_range(key, getattr(self, key), 0.0, 1.0, open_low=True, fix="3/4 lets three of four retrieve")
        check_choice("granularity", self.granularity, ("kv_head", "query_head"))

    @functools.cached_property
    def _size(self) -> Budget:
        return Budget.of(self.budget, self.ratio, self.critical, None, self.sink, self.local)

    def size(self) -> Budget:
        """Return the budget."""
        return self._size

    def plan(self) -> Plan:
        """Return a plan whose selector is this configuration."""
        return Plan(selector=self)

    def decide(self, step: Step, state: State) -> Decision:
        """Return the keys to read: retrieved, or shared from an earlier query, another layer or another head."""
        middle = Middle.of(step, self.size(), self.granularity)
        if not any(middle.counted):
            return Decision(None, counted=middle.counted, heads=middle.heads)
        if not step.peers:
            raise ValueError(
                "hshare shares between layers, and this is one layer alone (a replay, or one operator): run the whole model, for "
                "example with prehoc trace"
            )
        age = self._grow(step, state, middle)
        now = (age >= 0) & (age % max(round(1 / self.queries), 1) == 0)  # bool [B], on the host like all of the plan
        own = self._own_layer(step, now & (age > 0))  # int64 [B]: the layer each row reads from
        need = now[:, None] & (own == step.layer)[:, None] & self._own_heads(state, age)
        fresh = need.flatten().nonzero()[:, 0]
        if len(fresh):
            lists = retrieve_lists(step, middle, fresh.to(step.q.device), self.size(), dilate=0, radius=0)
            _put(state, fresh // middle.heads, fresh % middle.heads, *lists)
        for row in (now & (own == step.layer) & (age > 0)).nonzero()[:, 0].tolist():
            source = state["heads"][row].to(step.q.device)
            state["indices"][row], state["lengths"][row] = state["indices"][row, source], state["lengths"][row, source]
        for row in (now & (own != step.layer)).nonzero()[:, 0].tolist():
            peer = step.peers[int(own[row])]
            _put(state, row, slice(None), peer["indices"][row], peer["lengths"][row])
        if bool((now & (age == 0)).any()):
            self._share_heads(state, (now & (age == 0)).nonzero()[:, 0].tolist(), step.columns)
        indices, lengths = state["indices"], state["lengths"]
        if not all(middle.counted):
            indices, lengths = cover(indices, lengths, step, middle, self.sink)
        return Decision(
            as_selection(indices, lengths),
            need.to(step.q.device),
            None,
            middle.counted,
            middle.scored,
            heads=middle.heads,
        )

    def _grow(self, step: Step, state: State, middle: Middle) -> Tensor:
        """Move the local keys of every list on by one, and count the steps since each row's first, int64 ``[B]``."""
        b, hs = len(middle.start), middle.heads
        if "age" not in state:
            state["age"] = torch.full((b,), -1)
            state["heads"] = torch.arange(hs).expand(b, hs).clone()
            state["indices"] = torch.full((b, hs, 0), -1, dtype=torch.int32, device=step.q.device)
            state["lengths"] = torch.zeros((b, hs), dtype=torch.int32, device=step.q.device)
        else:
            indices, lengths = state["indices"], state["lengths"][..., None]
            at = torch.arange(indices.shape[2], device=indices.device)
            state["indices"] = indices + ((at < lengths) & (at >= lengths - self.local))
        state["age"] = torch.where(torch.tensor(middle.counted), state["age"] + 1, -1)
        age: Tensor = state["age"]
        return age

    def _own_heads(self, state: State, age: Tensor) -> Tensor:
        """Return bool ``[B, Hs]``, heads that retrieve for themselves: all of them at a row's first step."""
        heads: Tensor = state["heads"]
        return (heads == torch.arange(heads.shape[1])) | (age == 0)[:, None]

    def _sets(self, state: State, row: int, columns: int) -> Tensor:
        """Return float32 ``[Hs, n]`` on the host: 1 where a head's list has the column as a critical key."""
        indices, lengths = state["indices"][row], state["lengths"][row]
        at = torch.arange(indices.shape[1], device=indices.device)
        critical = (at >= self.sink) & (at < lengths[:, None] - self.local)
        out = torch.zeros((indices.shape[0], columns + 1), device=indices.device)
        out.scatter_(1, torch.where(critical, indices.long(), columns), 1.0)
        return out[:, :columns].cpu()

    def _share_heads(self, state: State, rows: Sequence[int], columns: int) -> None:
        """Decide for each row whose set each head takes, from the sets of its first step."""
        for row in rows:
            sets = self._sets(state, row, columns)  # [Hs, n]
            state["heads"][row] = torch.tensor(assign((sets @ sets.mT).tolist(), self.heads))

    def _own_layer(self, step: Step, later: Tensor) -> Tensor:
        """Return int64 ``[B]``: the layer whose sets each row takes; itself at a row's first step."""
        known = list(step.peers)
        keeper = step.peers[known[0]]  # the lowest layer decides for all, before any set of the first step is replaced
        if "layers" not in keeper:
            keeper["layers"] = torch.arange(known[-1] + 1).expand(len(later), -1).clone()
            keeper["known"] = torch.zeros(len(later), dtype=torch.bool)
        if step.layer == known[0]:
            keeper["known"] &= keeper["age"] > 0
            for row in (later & ~keeper["known"]).nonzero()[:, 0].tolist():
                sets = torch.stack(
                    [self._sets(peer, row, step.columns).flatten() for peer in step.peers.values()]
                )  # [N, Hs * n]
                sources = assign((sets @ sets.mT).tolist(), self.layers, earlier=True)
                keeper["layers"][row, known] = torch.tensor([known[source] for source in sources])
                keeper["known"][row] = True
        own: Tensor = torch.where(later, keeper["layers"][:, step.layer], step.layer)
        return own


def assign(similarity: Sequence[Sequence[float]], share: float, earlier: bool = False) -> list[int]:
    """Return for each of N the one whose set it takes (itself, if it makes its own), the most similar pairs first.

    Parameters
    ----------
    similarity : sequence of sequence of float
        ``[N, N]``, symmetric.
    share : float
        Share of the N that make their own set; at least one does.
    earlier : bool
        Take sets only from what comes before, as layers must.

    Returns
    -------
    list of int
        A source makes its own set. Equal similarity: the earlier taker first, then the earlier source.
    """
    count = len(similarity)
    takers = count - max(math.floor(share * count + 0.5), 1)
    pairs = [(i, j) for j in range(count) for i in range(count) if (i < j if earlier else i != j)]
    pairs.sort(key=lambda pair: (-similarity[pair[0]][pair[1]], pair[1], pair[0]))
    source = list(range(count))
    for pass_on in (False, True):  # a source becomes a taker, and its takers go with it, only where it must
        for i, j in pairs:
            if takers and source[i] == i and source[j] == j and (pass_on or source.count(j) == 1):
                source = [i if held == j else held for held in source]
                takers -= 1
    return source


def _put(state: State, row: Tensor | int, head: Tensor | slice, indices: Tensor, lengths: Tensor) -> None:
    """Write lists int32 ``[R, K]`` of (row, head) pairs into the state, whose lists grow to hold them."""
    held = state["indices"]
    if held.shape[2] < indices.shape[-1]:
        held = state["indices"] = F.pad(held, (0, indices.shape[-1] - held.shape[2]), value=-1)
    indices = F.pad(indices, (0, held.shape[2] - indices.shape[-1]), value=-1)
    held[row, head] = indices
    state["lengths"][row, head] = lengths
