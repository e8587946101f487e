"""Blocked prefill attention against one T x T mask per row, written from the design."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prehoc.kernels.prefill import BLOCK, causal_pairs, prefill_window

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def depth(share: float, local: int) -> Callable[[int], int]:
    return lambda t: max(0, min(math.floor(share * t), t - local))


def sliding(window: int) -> Callable[[int], int]:
    return lambda t: max(0, t - window)


def visible(first: tuple[int, ...], n: int, tokens: int, hidden: Callable[[int], int] | None, sink: int) -> np.ndarray:
    """bool ``[B, T, n]``: what each query sees."""
    out = np.zeros((len(first), tokens, n), dtype=bool)
    for b, begin in enumerate(first):
        for i in range(tokens):
            column = n - tokens + i
            t = column - begin + 1
            low = hidden(t) if hidden is not None and t > 0 else 0
            for j in range(begin, column + 1):
                out[b, i, j] = j - begin < sink or j - begin >= low
    return out


def reference(q: Tensor, k: Tensor, v: Tensor, mask: np.ndarray, scale: float) -> np.ndarray:
    qn, kn, vn = (x.double().numpy() for x in (q, k, v))
    b, h, tokens, _ = qn.shape
    out = np.zeros((b, h, tokens, vn.shape[-1]))
    for i in range(b):
        for j in range(h):
            kv = j * kn.shape[1] // h
            logits = qn[i, j] @ kn[i, kv].T * scale
            logits[~mask[i]] = -np.inf
            real = mask[i].any(1)
            weights = np.exp(logits[real] - logits[real].max(1, keepdims=True))
            out[i, j, real] = weights / weights.sum(1, keepdims=True) @ vn[i, kv]
    return out


WINDOWS: dict[str, tuple[Callable[[int], int] | None, int]] = {
    "causal": (None, 0),
    "depth": (depth(0.6, 9), 4),
    "depth, no sinks": (depth(0.6, 9), 0),
    "depth, many sinks": (depth(0.3, 5), 40),
    "deep": (depth(0.98, 3), 2),
    "local 1": (depth(0.999, 1), 1),
    "hides nothing": (depth(0.001, 9), 4),
    "sliding": (sliding(37), 0),
    "sliding 1": (sliding(1), 0),
    "wide sliding": (sliding(1000), 0),
}
# tokens, past
SIZES = [
    (1, 0),
    (2, 0),
    (127, 0),
    (128, 0),
    (129, 0),
    (300, 0),
    (1, 60),
    (1, 300),
    (40, 90),
    (128, 5),
    (129, 130),
    (7, 1),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_equals_the_mask(window: str, size: tuple[int, int]) -> None:
    (hidden, sink), (tokens, past) = WINDOWS[window], size
    n = tokens + past
    q, k, v = (
        normal(3, 4, tokens, 16),
        normal(3, 2, n + 5, 16, seed=1)[:, :, :n],
        normal(3, 2, n + 5, 16, seed=2)[:, :, :n],
    )
    for first in ((0, 0, 0), (n // 3,) * 3, (0, n // 5, n - 1), (n // 2, 0, n // 4)):
        mask = visible(first, n, tokens, hidden, sink)
        got, pairs = prefill_window(q, k, v, first, 0.3, hidden, sink)
        assert got.shape == q.shape and bool(got.isfinite().all())
        assert np.abs(got.double().numpy() - reference(q, k, v, mask, 0.3)).max() < TOLERANCE[torch.float32]
        assert pairs >= mask.sum()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 40), (2, 3, 64), (1, 7, 80), (2, 2, 96), (1, 4, 128), (1, 1, 256)], ids=str)
def test_dtypes_and_shapes(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    hkv, group, d = shape
    q, k, v = normal(2, hkv * group, 150, d), normal(2, hkv, 171, d, seed=1), normal(2, hkv, 171, d, seed=2)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    for hidden, sink in WINDOWS["causal"], WINDOWS["depth"]:
        mask = visible((0, 33), 171, 150, hidden, sink)
        got, _ = prefill_window(q, k, v, (0, 33), d**-0.5, hidden, sink)
        assert got.dtype == dtype
        assert np.abs(got.double().numpy() - reference(q, k, v, mask, d**-0.5)).max() < TOLERANCE[dtype]


def test_padding_comes_out_as_zeros() -> None:
    q, k, v = normal(2, 2, 30, 8), normal(2, 2, 30, 8, seed=1), normal(2, 2, 30, 8, seed=2)
    got, _ = prefill_window(q, k, v, (0, 12), 0.3)
    assert bool((got[1, :, :12] == 0).all()) and bool((got[1, :, 12:] != 0).any())
    entirely, pairs = prefill_window(q[:, :, :5], k[:, :, :5], v[:, :, :5], (0, 12), 0.3)
    assert bool((entirely[1] == 0).all()) and pairs == causal_pairs(0, 5)


def test_values_may_have_another_size_than_keys() -> None:
    q, k, v = normal(1, 4, 140, 24), normal(1, 2, 140, 24, seed=1), normal(1, 2, 140, 16, seed=2)
    for hidden, sink in WINDOWS["causal"], WINDOWS["depth"]:
        mask = visible((0,), 140, 140, hidden, sink)
        got, _ = prefill_window(q, k, v, (0,), 0.3, hidden, sink)
        assert np.abs(got.double().numpy() - reference(q, k, v, mask, 0.3)).max() < 3e-6


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 200),
    st.integers(0, 150),
    st.lists(st.floats(0, 0.95), min_size=2, max_size=2),
    st.floats(0, 1),
    st.integers(1, 50),
    st.integers(0, 20),
    st.booleans(),
)
def test_any_window(
    tokens: int, past: int, pads: list[float], share: float, local: int, sink: int, slide: bool
) -> None:
    n = tokens + past
    first = tuple(int(p * n) for p in pads)
    hidden, sink = (sliding(local), 0) if slide else (depth(share, local), sink)
    q, k, v = normal(2, 2, tokens, 8), normal(2, 1, n, 8, seed=1), normal(2, 1, n, 8, seed=2)
    got, pairs = prefill_window(q, k, v, first, 0.5, hidden, sink)
    mask = visible(first, n, tokens, hidden, sink)
    assert np.abs(got.double().numpy() - reference(q, k, v, mask, 0.5)).max() < 4e-6
    assert pairs >= mask.sum()


# --------------------------------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("begin", "end", "window"),
    [
        (0, 1, None),
        (0, 50, None),
        (7, 50, None),
        (0, 50, 9),
        (7, 50, 9),
        (30, 31, 9),
        (-5, 12, None),
        (-5, 12, 4),
        (-9, -2, 4),
    ],
)
def test_causal_pairs(begin: int, end: int, window: int | None) -> None:
    count = 0
    for token in range(max(begin, 0), max(end, 0)):
        count += token + 1 if window is None else min(token + 1, window)
    assert causal_pairs(begin, end, window) == count


def test_causal_attention_is_counted_as_its_triangle() -> None:
    for tokens, past in SIZES:
        n = tokens + past
        q, k, v = normal(2, 2, tokens, 8), normal(2, 2, n, 8), normal(2, 2, n, 8)
        for first in ((0, 0), (0, n // 2)):
            _, pairs = prefill_window(q, k, v, first, 0.3)
            assert pairs == visible(first, n, tokens, None, 0).sum()


def test_pruned_pairs_exceed_what_is_visible_by_less_than_a_block() -> None:
    """What is counted is what is computed: a block against the union of its windows."""
    n = 1000
    q, k, v = normal(1, 1, n, 8), normal(1, 1, n, 8), normal(1, 1, n, 8)
    for hidden, sink in (WINDOWS["depth"], WINDOWS["deep"], WINDOWS["sliding"]):
        _, pairs = prefill_window(q, k, v, (0,), 0.3, hidden, sink)
        seen = int(visible((0,), n, n, hidden, sink).sum())
        assert seen <= pairs <= seen + n * BLOCK
        assert pairs < causal_pairs(0, n)


@pytest.mark.parametrize("past", [0, 40])
def test_a_window_that_hides_nothing_costs_what_dense_costs(past: int) -> None:
    """phi = 1, or a sliding window longer than the text, saves nothing and must not be booked as extra work."""
    n = 100 + past
    q, k, v = normal(1, 1, 100, 8), normal(1, 1, n, 8), normal(1, 1, n, 8)
    _, pairs = prefill_window(q, k, v, (0,), 0.3, sliding(500), 0)
    assert pairs == causal_pairs(past, n)


def test_work_of_a_hidden_part_is_not_done() -> None:
    """Keys that no query of a block sees may hold NaN."""
    q, k, v = normal(1, 1, 40, 8), normal(1, 1, 440, 8), normal(1, 1, 440, 8)
    k[:, :, 4:150], v[:, :, 4:150] = math.nan, math.nan
    got, _ = prefill_window(q, k, v, (0,), 0.3, lambda t: t // 2, 4)
    assert bool(got.isfinite().all())
