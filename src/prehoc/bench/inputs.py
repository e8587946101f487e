"""What an attention benchmark runs on: the shapes of known models, and queries, keys and values random or traced."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from prehoc.config import unknown
from prehoc.trace import Trace

TURN = 0.998
"""Cosine of a random query with the one before: far enough over any gate that a block lasts as long as it may."""
HEAD = 64
"""First keys of a trace that stay when a cell is shorter than the trace (sinks live there); its last keys follow."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Attention of a model: N layers, H query heads, Hkv KV heads, head size D."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    dim: int

    def kv_bytes(self, batch: int, length: int, dtype: torch.dtype) -> int:
        """Return the bytes of one layer's keys and values."""
        return 2 * batch * self.kv_heads * length * self.dim * dtype.itemsize


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama2-7b", 32, 32, 32, 128),
        Shape("qwen2.5-7b", 28, 28, 4, 128),
        Shape("smollm2", 30, 9, 3, 64),
    )
}


@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """One sequence of one layer.

    Parameters
    ----------
    q : Tensor
        float32 ``[S, H, D]``, the queries of S consecutive steps, the last of which sees all keys.
    k, v : Tensor
        float32 ``[Hkv, L, D]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor


class Inputs(Protocol):
    """A source of layers."""

    name: str

    def shape(self, name: str) -> Shape:
        """Return the shape of that name; ValueError for one that is unknown or cannot be filled."""
        ...

    def check(self, length: int, steps: int) -> None:
        """Raise ValueError unless there are layers of that length with that many steps."""
        ...

    def layer(self, shape: Shape, number: int, length: int, steps: int) -> LayerInputs:
        """Return layer `number` of a shape."""
        ...

    def describe(self) -> list[dict[str, Any]]:
        """Return what identifies the inputs, ready for JSON."""
        ...


class RandomInputs:
    """Normal keys and values; queries that turn slowly, so that a block is shared as long as it may be (ρ̂ near 1 / s).

    Parameters
    ----------
    seed : int
        Seed of every layer, with its number.
    """

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def shape(self, name: str) -> Shape:
        """Return a shape of `SHAPES`."""
        if name == "traced":
            raise ValueError("shape 'traced' is that of a traced model: give a file with --inputs")
        if name not in SHAPES:
            raise unknown("shape", name, SHAPES)
        return SHAPES[name]

    def check(self, length: int, steps: int) -> None:
        """Raise ValueError unless keys are left before the steps."""
        if length <= steps:
            raise ValueError(f"length {length} leaves no prompt before {steps} steps; give more, or fewer steps")

    def layer(self, shape: Shape, number: int, length: int, steps: int) -> LayerInputs:
        """Draw a layer."""
        random = torch.Generator().manual_seed(self._seed * 1000 + number)
        k, v = torch.randn(2, shape.kv_heads, length, shape.dim, generator=random)
        turns = torch.randn(steps, shape.heads, shape.dim, generator=random)
        q = turns.clone()
        for step in range(1, steps):
            q[step] = TURN * q[step - 1] + (1 - TURN**2) ** 0.5 * turns[step]
        return LayerInputs(q, k, v)

    def describe(self) -> list[dict[str, Any]]:
        """Return the kind and the seed."""
        return [{"inputs": "random", "seed": self._seed}]


class TracedInputs:
    """Queries, keys and values of a real model, recorded with ``prehoc trace --record qkv``.

    Lengths are traced, never tiled: a cell takes the shortest trace that covers it, its first `HEAD` and its last keys.
    Heads are tiled, the head size is filled by repetition and the queries scaled so that every score stays what it was.

    Parameters
    ----------
    paths : list of Path
        The traces.

    Raises
    ------
    ValueError
        When a file is not such a trace, or the traces are of models of different shapes.
    """

    def __init__(self, paths: list[Path]) -> None:
        self.name = ",".join(path.name for path in paths)
        self._traces = sorted(((path.name, Trace.load(path)) for path in paths), key=lambda pair: _tokens(pair[1]))
        for name, trace in self._traces:
            if trace.q is None or trace.k is None or trace.v is None:
                raise ValueError(f"the trace {name!r} has no queries, keys and values; record it with --record qkv")
            if not trace.meta["observe"] and trace.meta["method"] != "dense":
                raise ValueError(
                    f"the trace {name!r} was decoded sparsely, so its queries are that method's own; record it with --observe"
                )
        shapes = {self._own(trace) for _, trace in self._traces}
        if len(shapes) > 1:
            raise ValueError(f"the traces {self.name} are of different models; give those of one")
        self._shape = shapes.pop()

    @staticmethod
    def _own(trace: Trace) -> Shape:
        assert trace.q is not None and trace.k is not None
        return Shape("traced", trace.meta["layers"], trace.q.shape[2], trace.k.shape[1], trace.k.shape[3])

    def shape(self, name: str) -> Shape:
        """Return a shape of `SHAPES`, or ``traced``: that of the traced model."""
        if name == "traced":
            return self._shape
        if name not in SHAPES:
            raise unknown("shape", name, [*SHAPES, "traced"])
        if SHAPES[name].dim % self._shape.dim:
            raise ValueError(
                f"shape {name!r} has a head size of {SHAPES[name].dim}, which the traced {self._shape.dim} does not divide; "
                "take another shape or trace another model"
            )
        return SHAPES[name]

    def check(self, length: int, steps: int) -> None:
        """Raise ValueError unless a trace covers the length with enough steps."""
        longest, trace = self._traces[-1]
        if length > _tokens(trace):
            raise ValueError(
                f"length {length} is above the {_tokens(trace)} tokens of the trace {longest!r}; lengths are never tiled: "
                "give a shorter length or trace a longer text"
            )
        name, found = self._cover(length)
        if steps > found.meta["steps"]:
            raise ValueError(
                f"{steps} steps are more than the {found.meta['steps']} of the trace {name!r}; give fewer, or trace more"
            )
        if length < HEAD + steps:
            raise ValueError(f"length {length} is below {HEAD + steps}, the first keys and steps of a trace; give more")

    def _cover(self, length: int) -> tuple[str, Trace]:
        return next(pair for pair in self._traces if _tokens(pair[1]) >= length)

    def layer(self, shape: Shape, number: int, length: int, steps: int) -> LayerInputs:
        """Return the traced layer at the same depth, its heads tiled."""
        _, trace = self._cover(length)
        assert trace.q is not None and trace.k is not None and trace.v is not None
        full = [layer for layer in range(trace.meta["layers"]) if layer not in trace.meta["sliding_layers"]]
        layer = full[number * len(full) // shape.layers]
        total, own = _tokens(trace), self._shape
        columns = torch.cat([torch.arange(HEAD), torch.arange(total - length + HEAD, total)])
        kv = torch.arange(shape.kv_heads)
        groups, own_groups = shape.heads // shape.kv_heads, own.heads // own.kv_heads
        # copies of a KV head go on with the next query heads of its group: less of a copy where groups are smaller
        member = (kv // own.kv_heads)[:, None] * groups + torch.arange(groups)  # [Hkv, G]
        query = (kv % own.kv_heads)[:, None] * own_groups + member % own_groups
        repeat = shape.dim // own.dim
        keys = torch.from_numpy(trace.k[layer])[:, columns][kv % own.kv_heads]
        values = torch.from_numpy(trace.v[layer])[:, columns][kv % own.kv_heads]
        queries = torch.from_numpy(trace.q[-steps:, layer])[:, query.flatten()]
        factor = trace.meta["scale"][str(layer)] * shape.dim**0.5 / repeat
        return LayerInputs(
            (queries * factor).repeat(1, 1, repeat), keys.repeat(1, 1, repeat), values.repeat(1, 1, repeat)
        )

    def describe(self) -> list[dict[str, Any]]:
        """Return model, text and length of each trace."""
        return [
            {
                "inputs": name,
                "tokens": _tokens(trace),
                **{key: trace.meta.get(key) for key in ("model", "text", "method")},
            }
            for name, trace in self._traces
        ]


def _tokens(trace: Trace) -> int:
    """Return P + S."""
    return int(trace.meta["prompt_tokens"] + trace.meta["steps"])


def open_inputs(texts: list[str], seed: int) -> Inputs:
    """Return random inputs for ``["random"]``, else those of the traces at these paths."""
    if texts == ["random"]:
        return RandomInputs(seed)
    if "random" in texts:
        raise ValueError("--inputs random stands alone; give traces or random, not both")
    return TracedInputs([Path(text) for text in texts])
