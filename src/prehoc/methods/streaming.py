"""Streaming attention: sinks and the most recent keys, nothing else."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from prehoc.config import DEFAULT_SINK, Budget, check_int
from prehoc.selection import Decision, Plan, State, Step, Window


@dataclasses.dataclass(frozen=True)
class Streaming:
    """Read the first `sink` and the last ``budget - sink`` keys at every step.

    Parameters
    ----------
    budget : int, optional
        Keys to read, sinks included.
    ratio : float, optional
        Share of the row's prompt length instead (neither: 1/8, at least 256 keys).
    sink : int
        First keys that are always read.

    Raises
    ------
    ValueError
        When both or a too small budget is given.
    """

    name: ClassVar[str] = "streaming"
    granularity: ClassVar[str] = "kv_head"

    budget: int | None = None
    ratio: float | None = None
    sink: int = DEFAULT_SINK

    def __post_init__(self) -> None:
        check_int("sink", self.sink, 0)
        self.size()

    def size(self) -> Budget:
        """Return the budget."""
        if self.budget is None and self.ratio is None:
            return Budget.of(None, None, None, None, self.sink, local=1)
        return Budget(sink=self.sink, local=1, total=self.budget, ratio=self.ratio, floor=0)  # nothing is retrieved

    def plan(self) -> Plan:
        """Return a plan whose selector is this window."""
        return Plan(selector=self)

    def decide(self, step: Step, state: State) -> Decision:
        """Return the visible range: sinks and the last keys of each row."""
        budget = self.size()
        starts = []
        for pad, prompt, masked in zip(step.rows.pad, step.rows.prompt, step.masked, strict=True):
            recent = 1 + (budget.critical_for(prompt) or 0)  # local = 1 above: the newest key is part of `recent`
            starts.append(pad + max(step.columns - pad - recent, masked, 0))
        return Decision(Window(self.sink, tuple(starts)))
