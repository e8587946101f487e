"""Controls of PSAW: depth windows that cost as many query-key operations, but follow another schedule over the layers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import ClassVar

from prehoc.methods.psaw import PSAW, pruned_share, resolve_start_layer


class _Equal(PSAW):
    """A window with the shares of another schedule, scaled so that they sum up to PSAW's."""

    def _weights(self, deeper: int) -> list[float]:
        """Return how the pruning is spread over the layers above l_s, up to a factor."""
        raise NotImplementedError

    def masked(self, layer: int, layers: int) -> Callable[[int], int] | None:
        """Return the function from t to the leading keys hidden, as `PSAW.masked`.

        Raises
        ------
        ValueError
            When a layer would have to hide every key to reach PSAW's operations.
        """
        share = _shares(self, layers)[layer]
        if share == 0.0:
            return None
        return lambda t: max(0, min(math.floor(share * t), t - self.local))


@functools.lru_cache
def _shares(window: _Equal, layers: int) -> tuple[float, ...]:
    """Return the share of the keys that each layer hides."""
    total = sum(pruned_share(layer, layers, window.start_layer, window.phi, window.alpha) for layer in range(layers))
    start = resolve_start_layer(window.start_layer, layers)
    weights = [0.0] * min(start + 1, layers) + window._weights(max(layers - start - 1, 0))
    if total == 0.0:
        return (0.0,) * layers
    shares = tuple(weight * total / sum(weights) for weight in weights)
    if max(shares) >= 1.0:
        raise ValueError(
            f"phi={window.phi}, alpha={window.alpha} hide {total:.2f} layers of keys: method {window.name!r} cannot "
            f"spread them over {layers} layers without hiding all keys of one; give a larger phi, a smaller alpha or an "
            "earlier start_layer"
        )
    return shares


@dataclasses.dataclass(frozen=True)
class StaticWindow(_Equal):
    """One window for all layers above l_s, as wide as PSAW's are on average.

    Source: the PrHS paper, Tables VI and VII, panel B. Every key means what it means in `PSAW`, whose operations are matched.

    Parameters
    ----------
    phi, alpha, start_layer, sink, local
        As in `PSAW`.
    """

    name: ClassVar[str] = "static_window"

    def _weights(self, deeper: int) -> list[float]:
        return [1.0] * deeper


@dataclasses.dataclass(frozen=True)
class LinearWindow(_Equal):
    """A window that shrinks by the same share with every layer above l_s, hiding as many keys in all as PSAW.

    Source: the PrHS paper, Tables VI and VII, panel B. Every key means what it means in `PSAW`, whose operations are matched.

    Parameters
    ----------
    phi, alpha, start_layer, sink, local
        As in `PSAW`.
    """

    name: ClassVar[str] = "linear_window"

    def _weights(self, deeper: int) -> list[float]:
        return [float(step + 1) for step in range(deeper)]
