"""ETF, early token freezing: an expanding prefix of the prompt stops being updated in deeper layers."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

from prehoc.config import check_choice, check_range
from prehoc.methods.psaw import check_start_layer, pruned_share
from prehoc.selection import Plan


@dataclasses.dataclass(frozen=True)
class ETF:
    """Layer l processes only the prompt rows from E_l on; the earlier ones keep the state of their last live layer.

    Source: the PrHS paper, E_l(t) = floor((1 - psi^(gamma (l - l_s) / (N - l_s))) t) for l >= l_s, else 0, with t the
    prompt's real length. Acts on the first prompt only.

    Parameters
    ----------
    psi : float
        Share of the prompt that the deepest layers still update in the limit, in (0, 1]; 1 is dense.
    gamma : float
        How fast the frozen prefix grows with depth, >= 0.
    start_layer : float or int
        l_s: a fraction of the depth (float) or a layer number (int); this layer itself is unaffected.
    kv : {"project", "share"}
        Keys and values of frozen rows: projected from the frozen hidden state, or copied from their last live layer
        (saves the projections, not memory).

    Raises
    ------
    ValueError
        When a value lies outside its range.
    """

    name: ClassVar[str] = "etf"

    psi: float = 0.1
    gamma: float = 2.0
    start_layer: int | float = 0.9
    kv: Literal["project", "share"] = "project"

    def __post_init__(self) -> None:
        check_range("psi", self.psi, 0.0, 1.0, open_low=True, fix="1 freezes nothing")
        check_range("gamma", self.gamma, 0.0, math.inf)
        check_start_layer("start_layer", self.start_layer)
        check_choice("kv", self.kv, ("project", "share"))

    def plan(self) -> Plan:
        """Return a plan with this freezing."""
        return Plan(freeze=self)

    def frozen(self, layer: int, layers: int, tokens: int) -> int:
        """Return E_l: how many leading rows of a prompt of `tokens` real tokens layer `layer` leaves untouched."""
        share = pruned_share(layer, layers, self.start_layer, self.psi, self.gamma)
        return max(0, min(math.floor(share * tokens), tokens - 1))  # the product can round up to `tokens`
