"""PSAW, the progressive sliding attention window: deeper layers see an ever shorter recent window, plus sinks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

from prehoc.config import DEFAULT_LOCAL, DEFAULT_SINK, check_int, check_range
from prehoc.selection import Plan


def check_start_layer(key: str, value: object) -> None:
    """Raise ValueError unless `value` is a fraction in [0, 1] (float) or a layer number (int >= 0)."""
    if isinstance(value, float):
        check_range(key, value, 0.0, 1.0, fix="a float is a fraction of the depth, an int a layer number")
    else:
        check_int(key, value, 0)


def resolve_start_layer(value: float | int, layers: int) -> int:
    """Return the layer number for a fraction of the depth or a layer number.

    Raises
    ------
    ValueError
        When the layer does not exist in a model of `layers` layers.
    """
    start = math.floor(value * layers) if isinstance(value, float) else value
    if start > layers:
        raise ValueError(f"start_layer={value} is beyond the model's {layers} layers; give 0 to {layers - 1}")
    return start


def pruned_share(layer: int, layers: int, start_layer: float | int, base: float, power: float) -> float:
    """Return 1 - base^(power (l - l_s) / (N - l_s)), 0 up to l_s: the schedule shared by PSAW and ETF, in float64."""
    start = resolve_start_layer(start_layer, layers)
    return 0.0 if layer <= start else 1.0 - base ** (power * (layer - start) / (layers - start))


@dataclasses.dataclass(frozen=True)
class PSAW:
    """A query that sees t keys reads, at layer l, the sinks, its last `local` keys and the keys from P_l(t) on.

    Source: the PrHS paper, P_l(t) = floor((1 - phi^(alpha (l - l_s) / (N - l_s))) t) for l >= l_s, else 0.

    Parameters
    ----------
    phi : float
        Share of the keys that the deepest layers keep in the limit, in (0, 1]; 1 is dense.
    alpha : float
        How fast the window shrinks with depth, >= 0.
    start_layer : float or int
        l_s: a fraction of the depth (float) or a layer number (int); this layer itself is unaffected.
    sink, local : int
        First and last keys that are always read.

    Raises
    ------
    ValueError
        When a value lies outside its range.
    """

    name: ClassVar[str] = "psaw"

    phi: float = 0.7
    alpha: float = 1.5
    start_layer: int | float = 0.75
    sink: int = DEFAULT_SINK
    local: int = DEFAULT_LOCAL

    def __post_init__(self) -> None:
        check_range("phi", self.phi, 0.0, 1.0, open_low=True, fix="1 keeps every key")
        check_range("alpha", self.alpha, 0.0, math.inf)
        check_start_layer("start_layer", self.start_layer)
        check_int("sink", self.sink, 0)
        check_int("local", self.local, 1)

    def plan(self) -> Plan:
        """Return a plan with this window."""
        return Plan(window=self)

    def masked(self, layer: int, layers: int) -> Callable[[int], int] | None:
        """Return the function from t, the keys a query sees, to the leading keys hidden from it (None: nothing ever is).

        The last `local` keys are never hidden, nor are the sinks: they are the caller's to add.
        """
        share = pruned_share(layer, layers, self.start_layer, self.phi, self.alpha)
        if share == 0.0:
            return None
        return lambda t: max(0, min(math.floor(share * t), t - self.local))
