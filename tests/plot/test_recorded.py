"""What became of each key, against one written out key by key from the recorded queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench_shapes import record
from prehoc.plot.recorded import CRITICAL, DILATED, LOCAL, MISSED, SINK, UNREAD, UNSEEN, Layer, full_layers, read_mask
from prehoc.trace import Trace

PROMPT, STEPS = 117, 13
SIZES = "critical=12,sink=4,local=9"
CIS = f"cis:{SIZES},block_size=4,tau=0.2"
PHI, ALPHA = 0.5, 1.0
METHODS = {
    CIS: "max",
    f"{CIS},dilate=0": "max",
    f"{CIS},granularity=query_head": "max",
    f"{CIS},local_window=sliding,radius=2": "max",
    f"cpe:{SIZES},block_size=4,tau=0.2,phi={PHI},alpha={ALPHA},start_layer=0": "max",
    f"oracle:{SIZES}": "mean",
}


def attention(found: Trace, layer: int, step: int) -> np.ndarray:
    """float64 ``[Hs, G, t]``, one query head after another."""
    q, k = found.q[step, layer].astype(np.float64), found.k[layer].astype(np.float64)
    rows = []
    for head in range(q.shape[0]):
        logits = k[head * k.shape[0] // q.shape[0], : PROMPT + step + 1] @ q[head] * found.meta["scale"][str(layer)]
        e = np.exp(logits - logits.max())
        rows.append(e / e.sum())
    return np.array(rows).reshape(found.keys.shape[2], -1, PROMPT + step + 1)


def hidden(method: str, layer: int, t: int) -> int:
    return math.floor((1 - PHI ** (ALPHA * layer / 2)) * t) if method.startswith("cpe") else 0


def expected(found: Trace, method: str, layer: int, head: int, step: int) -> list[int]:
    t = PROMPT + step + 1
    mean = attention(found, layer, step)[head].mean(0)
    oracle = sorted(range(4, t - 9), key=lambda key: (-mean[key], key))[:12]
    anchor = max((s for s in range(step + 1) if found.retrieved[s, layer, head]), default=step)
    end, begin = PROMPT + anchor + 1 - 9, max(4, hidden(method, layer, PROMPT + anchor + 1))
    weights = attention(found, layer, anchor)[head]
    outside = [key for key in range(weights.shape[1]) if 4 <= key < begin]
    share = weights / (1 - weights[:, outside].sum(-1, keepdims=True))
    score = share.max(0) if METHODS[method] == "max" else share.mean(0)
    best = set(sorted(range(begin, end), key=lambda key: (-score[key], key))[:12])
    read = set(found.indices[step, layer, head].tolist())
    kinds = []
    for key in range(PROMPT + STEPS):
        if key >= t:
            kinds.append(UNSEEN)
        elif key in read:
            kinds.append(SINK if key < 4 else LOCAL if key >= end else CRITICAL if key in best else DILATED)
        else:
            kinds.append(MISSED if key in oracle else UNREAD)
    return kinds


@pytest.mark.parametrize("method", METHODS)
def test_kinds_are_those_written_out(method: str, tiny_llama: Callable[..., Path]) -> None:
    found = record(tiny_llama, PROMPT, STEPS, method, record=("selections", "qk"))
    seen = set()
    for layer in full_layers(found):
        kinds = Layer(found, layer).kinds()
        assert kinds.shape == (found.keys.shape[2], STEPS, PROMPT + STEPS) and kinds.dtype == np.uint8
        for head in range(kinds.shape[0]):
            for step in range(STEPS):
                want = expected(found, method, layer, head, step)
                assert kinds[head, step].tolist() == want, (layer, head, step)
                seen |= set(want)
    dilates = "dilate=0" not in method and not method.startswith("oracle")
    assert {SINK, LOCAL, CRITICAL, UNREAD} <= seen and (DILATED in seen) == dilates
    assert (MISSED in seen) == (not method.startswith("oracle"))


def test_keys_that_are_read_and_the_oracle_agree_with_the_trace(tiny_llama: Callable[..., Path]) -> None:
    found = record(tiny_llama, PROMPT, STEPS, CIS, record=("selections", "qk"))
    for layer in full_layers(found):
        read, exact = read_mask(found, layer), Layer(found, layer)
        assert (found.keys[:, layer] == read.sum(-1).T).all()
        retained = (np.asarray(exact.mean) * read).sum(-1)
        np.testing.assert_allclose(retained.T, found.retained[:, layer], atol=1e-5)
        hits = (read & exact.oracle()).sum(-1) / exact.oracle().sum(-1)
        np.testing.assert_allclose(hits.T, found.overlap[:, layer], atol=1e-6)
