"""One object per forward: what this forward is (prefill, decode, extend) and where its session keeps the books."""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from prehoc.books import Books, Stopwatch
from prehoc.integrations.transformers.layers import KVLayer
from prehoc.selection import Decision, Plan, Rows, Step, attend

if TYPE_CHECKING:
    from prehoc.audit import Auditor

Phase = Literal["prefill", "decode", "extend"]


@dataclasses.dataclass(frozen=True)
class Declared:
    """What a ``generate()`` call says of its prompt before its first forward.

    Parameters
    ----------
    tokens : int
        Columns of the whole prompt, padding included.
    pad : tuple of int or None
        Left padding per input row (None: no attention mask was given).
    capacity : int
        Columns that the cache will need.
    first_turn : bool
        Whether the cache is empty: later turns are dense.
    """

    tokens: int
    pad: tuple[int, ...] | None
    capacity: int
    first_turn: bool


declared: contextvars.ContextVar[Declared | None] = contextvars.ContextVar("prehoc_declared", default=None)


class Recorder(Protocol):
    """Sees every decode step of every full-attention layer."""

    def record(self, step: Step, v: Tensor, decision: Decision) -> None:
        """Take in one layer of one step."""
        ...


@dataclasses.dataclass
class Forward:
    """One call of the base model.

    Parameters
    ----------
    plan : Plan
        What the method asks for.
    weights : tuple of (int, int)
        Per layer, matrix weights of the whole layer and of its attention: two operations each per row.
    cache : Cache or None
        Its cache.
    past, tokens : int
        Columns cached before, and new ones.
    rows : Rows
        Padding and prompt length per row.
    phase : {"prefill", "decode", "extend"}
        Prefill prunes by depth and freezes, decode selects, extend (later turns, verification) is dense.
    books : Books
        Where to count.
    backend : str
        Kernel backend.
    observe : bool
        Select and record, but attend to everything.
    capture : bool
        Stop a layer right after its keys and values were cached.
    attend : callable
        Turns a decode step's selection into its output; a benchmark may put another kernel here.
    """

    plan: Plan
    weights: tuple[tuple[int, int], ...]
    cache: Any
    past: int
    tokens: int
    rows: Rows
    phase: Phase
    books: Books
    backend: str = "auto"
    observe: bool = False
    recorder: Recorder | None = None
    auditor: Auditor | None = None
    stopwatch: Stopwatch | None = None
    capture: bool = False
    attend: Callable[..., Tensor] = attend
    started: float = 0.0
    shared_until: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self.weights)

    def hidden(self, layer: int) -> Callable[[int], int] | None:
        """Return the depth window of a layer as a function of t, None where it hides nothing."""
        if self.plan.window is None or self.phase == "extend" or self.observe:
            return None
        return self.plan.window.masked(layer, self.layers)

    def masked(self, layer: int) -> tuple[int, ...]:
        """Return, per row, the tokens hidden at `layer` from the newest token."""
        window = self.plan.window.masked(layer, self.layers) if self.plan.window else None
        if window is None:
            return (0,) * len(self.rows.pad)
        total = self.past + self.tokens
        return tuple(window(total - pad) for pad in self.rows.pad)

    def frozen(self, layer: int) -> tuple[int, ...]:
        """Return, per row, how many leading columns of this forward layer `layer` leaves untouched."""
        freeze = self.plan.freeze
        if freeze is None or self.phase != "prefill" or self.observe:
            return (0,) * len(self.rows.pad)
        rows = zip(self.rows.pad, self.rows.prompt, strict=True)
        ends = [(freeze.frozen(layer, self.layers, tokens), pad) for pad, tokens in rows]
        return tuple(min(max(end + pad - self.past, 0), self.tokens) if end else 0 for end, pad in ends)

    def stores(self) -> list[Any]:
        """Return the stores of the full-attention layers."""
        return [layer.store for layer in self.cache.layers if isinstance(layer, KVLayer)] if self.cache else []


def left_padding(mask: Tensor | None, rows: int) -> tuple[int, ...]:
    """Return the left padding of each row of a 2-D mask (int or bool ``[B, n]``).

    Raises
    ------
    ValueError
        When a row has padding anywhere else, or no real token.
    """
    if mask is None:
        return (0,) * rows
    real = mask.to(torch.bool)
    pad = (real.cumsum(-1) == 0).sum(-1)
    expected = torch.arange(mask.shape[1], device=mask.device) >= pad[:, None]
    if not torch.equal(real, expected):
        raise ValueError(
            "the attention mask has padding inside or at the right of a row; prehoc supports left padding only: "
            "set tokenizer.padding_side = 'left'"
        )
    pads = tuple(pad.tolist())
    return pads
