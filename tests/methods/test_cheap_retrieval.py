"""CIS that scores an int8 copy of the keys first: its sets against exact ones, its copy as the text grows, its books."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from prehoc.books import Books
from prehoc.methods import CIS, parse_method
from prehoc.methods._cheap import SPARE, codes_of
from prehoc.selection import Rows, State, Step, decide

H, HKV, D, SCALE = 6, 2, 40, 0.2
KEYS: dict[str, Any] = {"sink": 3, "local": 5, "critical": 20, "block_size": 3, "tau": 0.4}


def walk(
    method: CIS,
    backend: str,
    steps: int = 8,
    start: int = 150,
    pad: tuple[int, ...] = (0, 7),
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Decide `steps` times on random keys; return the sets of every step, as lists a (row, head), and the books."""
    random = torch.Generator().manual_seed(3)
    keys = torch.randn(len(pad), HKV, start + steps, D, generator=random).to(dtype)
    base = torch.randn(len(pad), H, D, generator=random)
    state, books, sets = State(), Books(), []
    for i in range(steps):
        q = (base + 0.5 * torch.randn(len(pad), H, D, generator=random)).to(dtype)
        k = keys[:, :, : start + i]
        step = Step(0, q, k, k, SCALE, Rows(pad, tuple(start - p for p in pad)), (0,) * len(pad), backend)
        decision = decide(method.plan(), step, state)
        books.decision(step, D, decision)
        chosen = decision.selection
        sets.append([[x for x in row if x >= 0] for row in chosen.indices.flatten(0, 1).tolist()])  # type: ignore[union-attr]
    books.flush()
    return sets, books.traffic


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("more", [{}, {"granularity": "query_head"}, {"matched": True}, {"refresh": "block"}])
def test_reranking_everything_is_exact(backend: str, more: dict[str, Any]) -> None:
    exact, _ = walk(CIS(**KEYS, **more), backend)
    cheap, _ = walk(CIS(**KEYS, **more, retrieval="compact", rerank=20), backend)  # 20 x 20 keys: the whole middle
    assert cheap == exact


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_most_of_the_exact_set_is_found_and_reranking_finds_more(backend: str) -> None:
    exact, _ = walk(CIS(**KEYS, dilate=0), backend)

    def recall(rerank: int) -> float:
        found, _ = walk(CIS(**KEYS, dilate=0, retrieval="compact", rerank=rerank), backend)
        pairs = [
            (set(a), set(b)) for step, other in zip(exact, found, strict=True) for a, b in zip(step, other, strict=True)
        ]
        return sum(len(a & b) for a, b in pairs) / sum(len(a) for a, _ in pairs)

    assert 0.97 < recall(1) < 1 or recall(2) == 1
    assert recall(0) == recall(1), "ranked exactly or not, the set is the same"
    assert recall(2) >= recall(1) and recall(2) > 0.995


@pytest.mark.parametrize(
    "more", [{}, {"gate": "query", "matched": True, "local_window": "sliding"}, {"dilate": 3}, {"rerank": 0}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_native_step_decides_and_books_as_torch_does(more: dict[str, Any], dtype: torch.dtype) -> None:
    """Two rows of other lengths, ten steps: shared and retrieved ones, keys coded at the retrievals only."""
    method = CIS(**{**KEYS, **more}, retrieval="compact")
    ours, traffic = walk(method, "cpu", steps=10, dtype=dtype)
    assert traffic.retrievals < 10 * 2 * HKV
    sets, books = walk(method, "reference", steps=10, dtype=dtype)
    assert ours == sets
    assert traffic == dataclasses.replace(books, bytes_copied=0)  # torch gathers a shared set once


def test_the_copy_grows_with_the_text() -> None:
    keys, state = torch.randn(2, HKV, 40 + SPARE, D), State()
    for n in (30, 31, 39, 40 + SPARE):  # the last outgrows what was allocated
        step = Step(0, torch.randn(2, H, D), keys[:, :, :n], keys[:, :, :n], SCALE, Rows((0, 0), (n, n)), (0, 0))
        codes, scales = codes_of(state, step)
        assert codes.shape == (2, HKV, n, D) and codes.dtype == torch.int8
        assert torch.allclose(codes * scales[..., None], keys[:, :, :n], atol=float(scales.max()) / 2 + 1e-6)
    twin = state.take(torch.tensor([1, 1]))
    assert torch.equal(twin["codes"][0], state["codes"][1]) and twin["coded"] == 40 + SPARE


def test_books() -> None:
    _, exact = walk(CIS(**KEYS, gate="query"), "reference", steps=1, pad=(0,))
    _, cheap = walk(CIS(**KEYS, gate="query", retrieval="compact", rerank=2), "reference", steps=1, pad=(0,))
    middle_and_local = 150 - 3
    assert exact.bytes_scored == HKV * 150 * D * 4 and exact.bytes_compact == 0
    assert cheap.bytes_compact == HKV * middle_and_local * (D + 4)
    assert cheap.bytes_scored == HKV * (3 + 2 * 20 + 150) * D * 4  # sinks, two keys a critical one; all, to code them
    assert cheap.bytes_read - exact.bytes_read == cheap.bytes_scored + cheap.bytes_compact - exact.bytes_scored


def test_every_key_is_coded_once() -> None:
    """Retrievals at the first and the fifth step; the second codes the four keys since."""
    keys = {**KEYS, "gate": "query", "tau": -1.0, "block_size": 4, "retrieval": "compact"}
    _, found = walk(CIS(**keys), "reference", steps=5)
    assert found.retrievals == 2 * 2 * HKV
    assert found.bytes_scored == HKV * (2 * 2 * (3 + 2 * 20) + 154 + 147) * D * 4


def test_a_mass_needs_exact_scores() -> None:
    with pytest.raises(ValueError, match="mass= needs the exact weights of the keys"):
        CIS(mass=0.9, retrieval="compact")
    with pytest.raises(ValueError, match="unknown retrieval 'cheap'"):
        parse_method("cis:retrieval=cheap")
    with pytest.raises(ValueError, match="rerank=-1 must"):
        CIS(rerank=-1)
    with pytest.raises(ValueError, match="rerank=3 is for retrieval=compact"):
        parse_method("cpe:rerank=3")
    assert CIS(rerank=2, retrieval="exact") == CIS()
