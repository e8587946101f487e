"""What a method decides: the keys to read (`Selection`), and the protocol every selector follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from prehoc.config import Budget
    from prehoc.methods.etf import ETF
    from prehoc.methods.psaw import PSAW


@dataclasses.dataclass(frozen=True)
class Rows:
    """The batch rows of one cache: what the host knows without asking the device.

    Parameters
    ----------
    pad : tuple of int
        Left-padding columns of each row.
    prompt : tuple of int
        Real tokens of each row's prompt (0 until a prompt was read).
    """

    pad: tuple[int, ...]
    prompt: tuple[int, ...]

    def take(self, index: Tensor) -> Rows:
        """Return the rows at `index` (int64 ``[B']``); free of device synchronisation when all rows are alike."""
        if len(set(self.pad)) <= 1 and len(set(self.prompt)) <= 1:
            return Rows(self.pad[:1] * len(index), self.prompt[:1] * len(index))
        order = index.tolist()
        return Rows(tuple(self.pad[i] for i in order), tuple(self.prompt[i] for i in order))


@dataclasses.dataclass
class Selection:
    """Indices of the keys to read, per batch row and selection head.

    Parameters
    ----------
    indices : Tensor
        int32 ``[B, Hs, Kmax]`` cache columns, ascending and unique, padded with -1 at the end.
    lengths : Tensor
        int32 ``[B, Hs]``, keys that count.
    full : bool
        True when the host knows that every length equals Kmax (no padding to mask).
    keys, values : Tensor or None
        ``[B, Hs, Kmax, D]`` copies of the selected rows, when the selector keeps them between retrievals.
    """

    indices: Tensor
    lengths: Tensor
    full: bool = False
    keys: Tensor | None = None
    values: Tensor | None = None


@dataclasses.dataclass
class Window:
    """A visible range: each row's first `sink` real tokens and the columns from `start` on.

    Parameters
    ----------
    sink : int
        Number of sink tokens.
    start : tuple of int
        First column of the range, per row, never below the row's padding.
    """

    sink: int
    start: tuple[int, ...]


@dataclasses.dataclass
class Step:
    """One decode step of one layer, as a selector sees it.

    Parameters
    ----------
    layer : int
        Index of the layer.
    q : Tensor
        ``[B, H, D]`` queries after rotary embedding.
    k, v : Tensor
        ``[B, Hkv, n, D]`` keys and values, the newest included.
    scale : float
        Factor on q.k before the softmax.
    rows : Rows
        Padding and prompt length of each row.
    masked : tuple of int
        Per row, tokens that the depth window hides between the sinks and the window (0: nothing hidden): the middle
        starts no earlier.
    backend : str
        Kernel backend to use.
    peers : mapping of int to State
        The selection states of all full-attention layers, lowest first, for selectors with ``across_layers``; those below
        this layer have decided at this step already.
    hidden : Tensor or None
        ``[B, E]`` hidden states that enter the layer, for plans that say `Plan.reads_hidden` (None: nobody asked).
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    rows: Rows
    masked: tuple[int, ...]
    backend: str = "auto"
    peers: Mapping[int, State] = dataclasses.field(default_factory=dict)
    hidden: Tensor | None = None

    @property
    def columns(self) -> int:
        """Cache columns, padding included."""
        return self.k.shape[2]

    def key_bytes(self, begin: int) -> int:
        """Return the bytes of the real keys (K alone) in the columns from `begin` on, all rows and KV heads together."""
        keys = sum(max(self.columns - max(pad, begin), 0) for pad in self.rows.pad)
        return keys * self.k.shape[1] * self.k.shape[3] * self.k.element_size()


@dataclasses.dataclass
class Decision:
    """What to read at this step, and how it was decided.

    Parameters
    ----------
    selection : Selection, Window or None
        The keys to read; None: every visible key.
    retrieved : Tensor or None
        bool ``[B, Hs]``, heads that scored the middle in full at this step.
    cosine : Tensor or None
        float32 ``[B, Hs]``, least cosine of what the gate compares with the anchors, before any refresh (NaN: no anchor).
    counted : tuple of bool
        Per row, whether the middle was larger than `critical` (only these enter the retrieval ratio).
    scored : tuple of int
        Per row, keys whose K is read by a retrieval.
    anchors : int
        Bytes of stored anchors that the gate read, and of the axes along which it compares them.
    scores_all : bool
        Whether every head was scored, also those that did not need it (where the host may not look).
    heads : int or None
        Hs where `selection` does not say it (None: Hkv).
    copied : bool
        Whether the keys and values of the retrieved heads were copied.
    compact : tuple of int
        Per row, bytes of the int8 copy of the keys that one retrieval reads.
    summaries : int
        Bytes of stored summaries that were read to choose (page bounds, label channels, accumulated weights), and of the
        keys that new ones, and the axes of a gate on scores, were made from.
    evicted : tuple of int
        Per row, keys of the text that the cache no longer holds.
    out : Tensor or None
        ``[B, H, Dv]``, the attention output, when the method needs the weights and so has it already.
    """

    selection: Selection | Window | None
    retrieved: Tensor | None = None
    cosine: Tensor | None = None
    counted: tuple[bool, ...] = ()
    scored: tuple[int, ...] = ()
    anchors: int = 0
    scores_all: bool = False
    heads: int | None = None
    copied: bool = False
    compact: tuple[int, ...] = ()
    summaries: int = 0
    evicted: tuple[int, ...] = ()
    out: Tensor | None = None


class State(dict[str, Any]):
    """Selection state of one layer: every tensor has the batch as dimension 0, so that it follows the cache's rows.

    States and stores in it follow the rows too; what else is in it belongs to no row.
    """

    def take(self, index: Tensor) -> State:
        """Return the state of the rows at `index` (int64 ``[B']``)."""
        return State({name: _rows_at(value, index) for name, value in self.items()})


def _rows_at(value: Any, index: Tensor) -> Any:
    if isinstance(value, Tensor):
        return value.index_select(0, index.to(value.device))
    if isinstance(value, State):
        return value.take(index)
    if hasattr(value, "copy") and hasattr(value, "take"):  # a store
        value = value.copy()
        value.take(index)
    return value


class Selector(Protocol):
    """Chooses the keys of one decode step; all memory between steps lives in the `State` it is handed."""

    def decide(self, step: Step, state: State) -> Decision:
        """Return the keys to read for `step`, updating `state` in place."""
        ...

    def size(self) -> Budget:
        """Return the budget."""
        ...


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a method asks of the engine: a selector for decode, a depth window, frozen prompt tokens.

    Parameters
    ----------
    selector : Selector or None
        None: decode reads every visible key.
    window : PSAW or None
        Depth window, in prefill and decode.
    freeze : ETF or None
        Token freezing, in the first prompt only.
    """

    selector: Selector | None = None
    window: PSAW | None = None
    freeze: ETF | None = None

    @property
    def dense(self) -> bool:
        """True when nothing is pruned by construction."""
        return self.selector is None and self.window is None and self.freeze is None

    @property
    def reads_hidden(self) -> bool:
        """True when the selector compares the hidden states that enter a layer: the engine must hand them over."""
        return bool(getattr(self.selector, "reads_hidden", False))


class Method(Protocol):
    """A method's configuration: a frozen dataclass with a registered name."""

    name: ClassVar[str]

    def plan(self) -> Plan:
        """Return what the engine must do."""
        ...


def decide(plan: Plan, step: Step, state: State | None) -> Decision:
    """Return what a decode step reads under a plan: its selector's choice, else the depth window's range, else every key.

    Parameters
    ----------
    plan : Plan
        What the method asks for.
    step : Step
        The step.
    state : State or None
        The selector's memory (None: the plan has no selector).
    """
    decision = Decision(None)
    if plan.selector is not None and state is not None:
        decision = plan.selector.decide(step, state)
    if decision.selection is None and plan.window is not None and any(step.masked):
        starts = tuple(pad + hidden for pad, hidden in zip(step.rows.pad, step.masked, strict=True))
        decision.selection = Window(plan.window.sink, starts)
    return decision


def attend(ops: ModuleType, step: Step, chosen: Selection | Window | None) -> Tensor:
    """Return the attention output of a decode step over the keys that were chosen.

    Parameters
    ----------
    ops : module
        The operations of a kernel backend.
    step : Step
        The step.
    chosen : Selection, Window or None
        A decision's selection (None: every visible key).

    Returns
    -------
    Tensor
        ``[B, H, Dv]`` in the dtype of q.
    """
    q, k, v, scale, pad = step.q, step.k, step.v, step.scale, step.rows.pad
    if isinstance(chosen, Selection) and chosen.keys is not None and chosen.values is not None:
        out: Tensor = ops.decode_compact(q, chosen.keys, chosen.values, chosen.lengths, scale, chosen.full)
    elif isinstance(chosen, Selection):
        out = ops.decode_selected(q, k, v, chosen.indices, chosen.lengths, scale, chosen.full)
    elif isinstance(chosen, Window):
        out = ops.decode_dense(q, k, v, pad, chosen.sink, chosen.start, scale)
    else:
        out = ops.decode_dense(q, k, v, pad, 0, pad, scale)
    return out
