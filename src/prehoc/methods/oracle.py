"""The oracle: the exact top-k of this very query at every step. It reads all of K, so it bounds accuracy, not speed."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import torch

from prehoc.config import DEFAULT_LOCAL, DEFAULT_SINK, Budget, check_choice
from prehoc.methods._retrieval import Middle, as_selection, cover, retrieve_lists
from prehoc.selection import Decision, Plan, State, Step


@dataclasses.dataclass(frozen=True)
class Oracle:
    """Read sinks, local keys and the exact `critical` best keys of the middle, chosen anew at every step.

    With one set per KV head the best keys are those of the largest mean weight over the group's query heads: no other set
    of this size retains more mass.

    Parameters
    ----------
    budget, ratio, critical, mass
        The size, as in `prehoc.config.Budget`; ratio 1/8, at least 256 keys, when none is given.
    sink, local : int
        First and last keys that are always read.
    granularity : {"kv_head", "query_head"}
        One set per KV head or per query head.

    Raises
    ------
    ValueError
        When the sizes contradict each other or are too small.
    """

    name: ClassVar[str] = "oracle"

    budget: int | None = None
    ratio: float | None = None
    critical: int | None = None
    mass: float | None = None
    sink: int = DEFAULT_SINK
    local: int = DEFAULT_LOCAL
    granularity: Literal["kv_head", "query_head"] = "kv_head"

    def __post_init__(self) -> None:
        self.size()
        check_choice("granularity", self.granularity, ("kv_head", "query_head"))

    def size(self) -> Budget:
        """Return the budget."""
        return Budget.of(self.budget, self.ratio, self.critical, self.mass, self.sink, self.local)

    def plan(self) -> Plan:
        """Return a plan whose selector is this configuration."""
        return Plan(selector=self)

    def decide(self, step: Step, state: State) -> Decision:
        """Return the exact best keys of each head."""
        budget = self.size()
        middle = Middle.of(step, budget, self.granularity)
        if not any(middle.counted):
            return Decision(None, counted=middle.counted, heads=middle.heads)
        indices, lengths = retrieve_lists(step, middle, None, budget, dilate=0, radius=0, reduce="mean")
        shape = (step.q.shape[0], middle.heads)
        indices, lengths = indices.view(*shape, -1), lengths.view(shape)
        if not all(middle.counted):
            indices, lengths = cover(indices, lengths, step, middle, budget.sink)
        retrieved = torch.tensor(middle.counted, device=step.q.device)[:, None].expand(shape)
        return Decision(as_selection(indices, lengths), retrieved, None, middle.counted, middle.scored)
