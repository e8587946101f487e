"""The path without host synchronisation, as an accelerator runs it, chooses exactly the same keys."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from prehoc.books import Books, Traffic
from prehoc.kernels import host
from prehoc.methods import parse_method
from prehoc.selection import Decision, Rows, Selection, State, Step
from walking import walk

METHODS = [
    "cis:critical=24,sink=2,local=4",
    "cis:critical=24,sink=2,local=4,refresh=block,local_window=sliding",
    "cis:critical=24,sink=2,local=4,matched=true,block_size=4",
    "cis:mass=0.9,sink=2,local=4",
    "cis:critical=24,sink=2,local=4,granularity=query_head,dilate=5,radius=2",
    "cis_key:critical=24,sink=2,local=4,tau=0.1",
    "cis_key:critical=24,sink=2,local=4,tau=0.1,granularity=query_head,refresh=block",
    "cis_hidden:critical=24,sink=2,local=4,tau=0.8",
    "oracle:critical=24,sink=2,local=4",
]


def _walk(method: str, pads: tuple[int, ...], steps: int = 20) -> list[Decision]:
    torch.manual_seed(3)
    chosen, state, length = parse_method(method), State(), 90
    selector = chosen.plan().selector
    assert selector is not None
    k = torch.randn(len(pads), 2, length + steps, 16)
    q = torch.randn(len(pads), 6, 16)
    hidden = torch.randn(len(pads), 12)
    rows = Rows(pads, tuple(length - pad for pad in pads))
    out = []
    for i in range(steps):
        q, hidden = (x + 0.25 * torch.randn(x.shape) for x in (q, hidden))
        now = k[:, :, : length + i + 1]
        step = Step(0, q, now, now, 0.25, rows, (0,) * len(pads), "reference", hidden=hidden)
        decision = selector.decide(step, state)
        if isinstance(decision.selection, Selection):  # lists are views of the state: keep what they are now
            kept = dataclasses.replace(
                decision.selection,
                indices=decision.selection.indices.clone(),
                lengths=decision.selection.lengths.clone(),
            )
            decision = dataclasses.replace(decision, selection=kept)
        out.append(decision)
    return out


@pytest.mark.parametrize("pads", [(0,), (0, 7, 61)], ids=["one", "ragged"])
@pytest.mark.parametrize("method", METHODS)
def test_same_keys(method: str, pads: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _walk(method, pads)
    monkeypatch.setattr(host, "may_look", lambda device: False)
    found = _walk(method, pads)
    assert any(bool((~d.retrieved).any()) for d in expected if d.retrieved is not None) or method.startswith("oracle")
    for a, b in zip(expected, found, strict=True):
        assert isinstance(a.selection, Selection) and isinstance(b.selection, Selection)
        torch.testing.assert_close(a.selection.lengths, b.selection.lengths)
        width = a.selection.indices.shape[2]
        torch.testing.assert_close(a.selection.indices, b.selection.indices[..., :width])
        assert bool((b.selection.indices[..., width:] == -1).all())
        if a.retrieved is not None:
            assert b.retrieved is not None
            torch.testing.assert_close(a.retrieved, b.retrieved)


def test_books_hold_what_every_head_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads of eight channels, 71 to 79 keys: one retrieval is needed, and all steps score."""

    keys = "critical=9,sink=3,local=4,refresh=block,block_size=64,tau=-1,gate=query"

    def traffic(more: str) -> Traffic:
        books = Books()
        for step, decision in walk(f"cis:{keys}{more}", (0,), 70, 9):
            books.decision(step, 8, decision)
        books.flush()
        return books.traffic

    compact = ",retrieval=compact"
    assert traffic("").bytes_scored == 2 * 71 * 8 * 4 and traffic(compact).bytes_compact == 2 * 68 * (8 + 4)
    monkeypatch.setattr(host, "may_look", lambda device: False)
    exact, cheap = traffic(""), traffic(compact)
    assert exact.bytes_scored == 2 * sum(range(71, 80)) * 8 * 4 and exact.retrievals == cheap.retrievals == 2
    assert cheap.bytes_compact == 2 * (sum(range(71, 80)) - 9 * 3) * (8 + 4)
    assert cheap.bytes_scored == 2 * (9 * (3 + 2 * 9) + 79) * 8 * 4, "sinks, the best, and every key to code it"
