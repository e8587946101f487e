"""Decode steps over random queries and keys, for tests of a selector alone, with and without their prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from prehoc import kernels
from prehoc.methods import parse_method
from prehoc.selection import Decision, Rows, Selection, State, Step

PROMPT, STEPS = 40, 12  # of `text`


def steps(
    pad: tuple[int, ...],
    prompt: int,
    count: int,
    layer: int = 0,
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
) -> Iterator[Step]:
    """Steps of one layer: 4 query heads, 2 KV heads, 8 channels, 12 hidden ones; row b has ``prompt - pad[b]`` prompt tokens."""
    random = torch.Generator().manual_seed(100 * layer + count)
    b = len(pad)
    k, v = (torch.randn(b, 2, prompt + count, 8, generator=random).to(dtype) for _ in range(2))
    q = torch.randn(b, 4, 8, generator=random)
    apart = torch.Generator().manual_seed(count)
    hidden = torch.randn(b, 12, generator=apart)
    rows = Rows(pad, tuple(prompt - p for p in pad))
    backend = kernels.resolve(backend, k.device, dtype)  # float64 is for the reference alone
    for n in range(prompt + 1, prompt + count + 1):
        q = q + 0.3 * torch.randn(q.shape, generator=random)
        hidden = hidden + 0.3 * torch.randn(hidden.shape, generator=apart)
        yield Step(layer, q.to(dtype), k[:, :, :n], v[:, :, :n], 0.4, rows, (0,) * b, backend, hidden=hidden.to(dtype))


def walk(method: str, pad: tuple[int, ...], prompt: int, count: int, layer: int = 0) -> list[tuple[Step, Decision]]:
    """Decide at every step; the lists are copies of what they were."""
    selector, state = parse_method(method).plan().selector, State()
    assert selector is not None
    out = []
    for step in steps(pad, prompt, count, layer):
        decision = selector.decide(step, state)
        if isinstance(chosen := decision.selection, Selection):
            kept = dataclasses.replace(chosen, indices=chosen.indices.clone(), lengths=chosen.lengths.clone())
            decision = dataclasses.replace(decision, selection=kept)
        out.append((step, decision))
    return out


def read(decision: Decision, row: int, head: int) -> list[int]:
    """The columns that a head reads, checked to be ascending with nothing but -1 behind them."""
    assert isinstance(decision.selection, Selection)
    length = int(decision.selection.lengths[row, head])
    columns = decision.selection.indices[row, head].tolist()
    assert columns[length:] == [-1] * (len(columns) - length)
    assert columns[:length] == sorted(set(columns[:length])) and min(columns[:length]) >= 0
    return columns[:length]


def text(pad: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Rows]:
    """Queries ``[B, 4, n, 8]``, keys and values ``[B, 2, n, 8]`` of a prompt and what follows, and its rows."""
    random = torch.Generator().manual_seed(3)
    n = PROMPT + STEPS
    q = torch.randn(len(pad), 4, n, 8, generator=random).to(dtype)
    k, v = (torch.randn(len(pad), 2, n, 8, generator=random).to(dtype) for _ in range(2))
    return q, k, v, Rows(pad, tuple(PROMPT - p for p in pad))


def told(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> list[Step]:
    """The decode steps of `text`, with kernels that take its dtype."""
    backend = kernels.resolve("auto", q.device, q.dtype) if type(q) is Tensor else "reference"
    return [
        Step(0, q[:, :, n - 1], k[:, :, :n], v[:, :, :n], 0.4, rows, (0,) * len(rows.pad), backend)
        for n in range(PROMPT + 1, PROMPT + STEPS + 1)
    ]
