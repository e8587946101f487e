"""Quest: pages by their bounds, in rows of any length, and what it says it reads."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from prehoc.books import Books
from prehoc.kernels import host
from prehoc.methods import Quest, parse_method
from prehoc.selection import State, Step
from walking import read, steps, walk


def pages_by_hand(step: Step, row: int, head: int, heads: int, method: Quest, allowed: int) -> list[int]:
    """The pages with the largest bounds, from the keys themselves, one page and channel at a time."""
    pad, size, kv = step.rows.pad[row], method.page_size, head * 2 // heads
    t = step.columns - pad
    count = -(-t // size)
    queries = step.q[row, head * (4 // heads) : (head + 1) * (4 // heads)].double() * step.scale
    bounds = torch.empty(len(queries), count, dtype=torch.float64)
    for page in range(count):
        keys = step.k[row, kv, pad + page * size : pad + (page + 1) * size].double()
        for g, q in enumerate(queries):
            bounds[g, page] = sum(max(c * lo, c * hi) for c, lo, hi in zip(q, keys.amin(0), keys.amax(0), strict=True))
    if len(queries) > 1:
        bounds = bounds - torch.logsumexp(bounds, -1, keepdim=True)
    score = bounds.amax(0).tolist()
    always = {p for p in range(count) if p * size < method.sink or (p + 1) * size > t - method.local}
    rest = sorted(set(range(count)) - always, key=lambda p: (-score[p], p))
    return sorted(always | set(rest[: allowed - len(always)]))


@pytest.mark.parametrize("granularity", ["kv_head", "query_head"])
@pytest.mark.parametrize(
    ("keys", "allowed"),
    [("budget=32,page_size=4", 8), ("budget=35,page_size=7", 5), ("critical=21,sink=5,local=6,page_size=4", 8)],
)
@pytest.mark.parametrize("pad", [(0,), (0, 5, 43)], ids=["one", "ragged"])
def test_the_best_pages_are_read(granularity: str, keys: str, allowed: int, pad: tuple[int, ...]) -> None:
    text = f"quest:{keys},dense_layers=0,granularity={granularity}"
    method, chosen = parse_method(text), 0
    assert isinstance(method, Quest)
    heads = 2 if granularity == "kv_head" else 4
    for step, decision in walk(text, pad, 70, 9):
        for row, begin in enumerate(pad):
            t = step.columns - begin
            covered = -(-t // method.page_size) <= allowed
            assert decision.counted[row] is not covered
            for head in range(heads):
                pages = pages_by_hand(step, row, head, heads, method, allowed)
                wanted = [c for p in pages for c in range(p * method.page_size, (p + 1) * method.page_size) if c < t]
                assert read(decision, row, head) == [begin + c for c in (range(t) if covered else wanted)]
                chosen += not covered
    assert chosen


def test_first_layers_are_dense_and_covered_rows_too() -> None:
    for layer, text in ((0, "quest:budget=32"), (1, "quest:budget=32"), (2, "quest:budget=112"), (0, "quest")):
        for _, decision in walk(text, (0, 9), 70, 3, layer):
            assert decision.selection is None
            assert decision.counted == (() if layer < 2 else (False, False))
    assert all(d.selection is not None for _, d in walk("quest:budget=32", (0, 9), 70, 3, layer=2))


def test_books_hold_bounds_and_pages() -> None:
    books, state = Books(), State()
    method = Quest(budget=32, page_size=8, dense_layers=0)
    for step in steps((0, 3), 70, 4):
        books.decision(step, 8, method.decide(step, state))
    books.flush()
    traffic = books.traffic
    pages, keys = 0, 0
    for n in (71, 72, 73, 74):
        for t in (n, n - 3):
            pages += -(-t // 8)
            keys += 3 * 8 + (t - 1) % 8 + 1  # three whole pages and the newest
    # two bounds a page, and once each of the 74 and 71 keys they are made of; two KV heads, eight channels of four bytes
    assert traffic.bytes_scored == (2 * pages + 74 + 71) * 2 * 8 * 4
    assert traffic.keys_read == 2 * keys
    assert traffic.bytes_processed == 2 * keys * 2 * 8 * 4
    assert traffic.retrievals == 0 and traffic.counted_triples == 4 * 2 * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_bounds_follow_new_keys_in_every_dtype(dtype: torch.dtype) -> None:
    state, method = State(), Quest(budget=32, page_size=8, dense_layers=0)
    for step in steps((0, 3), 70, 80, dtype=dtype):  # more pages than were allocated at first
        method.decide(step, state)
        for row, pad in enumerate(step.rows.pad):
            for page, keys in enumerate(step.k[row, :, pad:].split(8, dim=1)):
                assert torch.equal(state["bounds"][row, :, page], torch.cat([keys.amax(1), keys.amin(1)], -1))
        assert state["bounds"].dtype == dtype


@pytest.mark.parametrize("pad", [(0, 3, 50), (3, 3, 3)])
def test_nothing_is_asked_of_the_device(monkeypatch: pytest.MonkeyPatch, pad: tuple[int, ...]) -> None:
    """Values of fake tensors cannot be read: a look at the device would raise."""
    monkeypatch.setattr(host, "may_look", lambda device: False)
    method, state = Quest(budget=32, page_size=8, dense_layers=0), State()
    with FakeTensorMode(allow_non_fake_inputs=True):
        for step in steps(pad, 70, 3, backend="reference"):  # C++ reads memory, which fake tensors lack
            decision = method.decide(step, state)
    assert decision.selection is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quest:budget=31", "31 keys are too few: 1 of their pages of 16 are always read; give at least 32"),
        ("quest:critical=30", "31 keys are too few"),
        ("quest:budget=64,sink=20,local=18,page_size=16", "64 keys are too few: 5 of .* at least 96"),
        ("quest:page_size=0", "page_size=0 must be at least 1"),
        ("quest:dense_layers=-1", "dense_layers=-1 must be at least 0"),
        ("quest:granularity=page", "unknown granularity 'page'"),
        ("quest:budget=64,ratio=0.5", "both set the size"),
        ("quest:mass=0.9", "unknown key 'mass' for method 'quest'"),
    ],
)
def test_errors_name_the_value_and_the_fix(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_method(text)
