"""H2O: which keys live, in rows of any length, on a cache that shrinks and on a copy of one that stays whole."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from prehoc.books import Books
from prehoc.cache import KVStore
from prehoc.kernels import host
from prehoc.methods import H2O, SnapKV, parse_method
from prehoc.selection import Selection, State
from walking import PROMPT, STEPS, text, told


def living(q: Tensor, k: Tensor, row: int, head: int, pad: int, total: int, sink: int, local: int) -> list[list[int]]:
    """The columns that each step reads, one query, key and sum at a time."""
    sums = dict.fromkeys(range(pad, PROMPT), 0.0)

    def attend(column: int, visible: list[int]) -> None:
        for g in (2 * head, 2 * head + 1):
            logits = [float(q[row, g, column] @ k[row, head, j]) * 0.4 for j in visible]
            top = max(logits)
            weights = [math.exp(x - top) for x in logits]
            for j, weight in zip(visible, weights, strict=True):
                sums[j] += weight / sum(weights)

    for column in range(pad, PROMPT):
        attend(column, list(range(pad, column + 1)))
    alive, out = list(range(pad, PROMPT)), []
    for column in range(PROMPT, PROMPT + STEPS):
        alive.append(column)
        sums[column] = 0.0
        while len(alive) > total:  # the first step only
            alive.remove(min((j for j in alive if pad + sink <= j <= column - local), key=lambda j: (sums[j], -j)))
        out.append(sorted(alive))
        attend(column, alive)
        if len(alive) == total:
            alive.remove(min((j for j in alive if pad + sink <= j < column + 2 - local), key=lambda j: (sums[j], -j)))
    return out


def watched(method: H2O, q: Tensor, k: Tensor, pad: tuple[int, ...], chunks: tuple[int, ...] = (PROMPT,)) -> State:
    notes, begin = State(), 0
    for end in chunks:
        method.watch(q[:, :, begin:end], k[:, :, :end], pad, 0.4, notes)
        begin = end
    return notes


@pytest.mark.parametrize("pad", [(0,), (0, 5, 30), (20, 32)], ids=["one", "ragged", "short"])
@pytest.mark.parametrize("keys", ["budget=17", "ratio=0.5"])
@pytest.mark.parametrize("chunks", [(PROMPT,), (33, 39, PROMPT)], ids=["whole", "chunks"])
def test_the_heavy_hitters_live(pad: tuple[int, ...], keys: str, chunks: tuple[int, ...]) -> None:
    method = parse_method(f"h2o:{keys},sink=2,local=4")
    assert isinstance(method, H2O)
    q, k, v, rows = text(pad)
    state, store = State(notes=watched(method, q, k, pad, chunks)), KVStore()
    store.append(k[:, :, :PROMPT], v[:, :, :PROMPT])
    store.rows, store.notes = rows, watched(method, q, k, pad, chunks)
    totals = [17 if keys == "budget=17" else max((PROMPT - p) // 2, 14) for p in pad]
    wanted = [
        [living(q, k, row, head, p, totals[row], 2, 4) for head in range(2)] for row, p in enumerate(pad)
    ]  # [B][Hkv][step]
    for number, step in enumerate(told(q, k, v, rows)):
        whole = method.decide(step, state)
        assert isinstance(whole.selection, Selection) and whole.evicted == ()
        store.append(step.k[:, :, -1:], step.v[:, :, -1:])
        now, decision, columns = method.run(store, step)
        assert decision.selection is None and decision.out is not None
        assert store.length + store.dropped == step.columns
        for row, p in enumerate(pad):
            for head in range(2):
                alive = wanted[row][head][number]
                length = int(whole.selection.lengths[row, head])
                assert whole.selection.indices[row, head, :length].tolist() == alive
                assert bool((whole.selection.indices[row, head, length:] == -1).all())
                assert sorted(columns[row, head, now.rows.pad[row] :].tolist()) == alive
                for g in (2 * head, 2 * head + 1):
                    weights = torch.softmax(step.k[row, head, alive] @ step.q[row, g] * 0.4, 0)
                    torch.testing.assert_close(decision.out[row, g], weights @ step.v[row, head, alive])
            gone = step.columns - p - len(wanted[row][0][number])
            assert decision.evicted[row] == gone
            assert decision.counted[row] == whole.counted[row] == (gone > 0)


def test_memory_is_given_back_and_never_grows_again() -> None:
    method = H2O(budget=17, sink=2, local=4)
    q, k, v, rows = text((0, 5))
    store = KVStore()
    store.append(k[:, :, :PROMPT], v[:, :, :PROMPT], capacity=4096)
    store.rows, store.notes = rows, watched(method, q, k, rows.pad)
    before, sizes = store.nbytes, []
    for step in told(q, k, v, rows):
        store.append(step.k[:, :, -1:], step.v[:, :, -1:], capacity=4096)
        method.run(store, step)
        sizes.append(store.nbytes)
        assert store.length == 16  # one less than the budget: the next key has its place
    assert max(sizes) == sizes[0] < before / 10


def test_rows_that_grow_beside_rows_that_are_full_keep_both() -> None:
    method = H2O(ratio=0.5, sink=2, local=4)
    q, k, v, rows = text((0, 26))  # 20 keys of 40, and 14 of a row of 14
    store = KVStore()
    store.append(k[:, :, :PROMPT], v[:, :, :PROMPT])
    store.rows, store.notes = rows, watched(method, q, k, rows.pad)
    for step in told(q, k, v, rows):
        store.append(step.k[:, :, -1:], step.v[:, :, -1:])
        now, _, _ = method.run(store, step)
        assert [now.columns - begin for begin in now.rows.pad] == [20, 14]
        assert store.length == 19 and store.first == (0, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_kept_in_float32(dtype: torch.dtype) -> None:
    method, (q, k, v, rows) = H2O(budget=17, sink=2, local=4), text((0, 5), dtype)
    store = KVStore()
    store.append(k[:, :, :PROMPT], v[:, :, :PROMPT])
    store.rows, store.notes = rows, watched(method, q, k, rows.pad)
    for step in told(q, k, v, rows):
        store.append(step.k[:, :, -1:], step.v[:, :, -1:])
        _, decision, _ = method.run(store, step)
        assert store.notes["sums"].dtype == torch.float32
        assert decision.out is not None and decision.out.dtype == dtype


def test_books_tell_what_is_held_from_what_the_text_has() -> None:
    method, (q, k, v, rows) = H2O(budget=17, sink=2, local=4), text((0, 5), torch.float32)
    books, store = Books(), KVStore()
    store.append(k[:, :, :PROMPT], v[:, :, :PROMPT])
    store.rows, store.notes = rows, watched(method, q, k, rows.pad)
    for step in told(q, k, v, rows):
        store.append(step.k[:, :, -1:], step.v[:, :, -1:])
        now, decision, _ = method.run(store, step)
        books.decision(now, 8, decision)
    books.flush()
    traffic = books.traffic
    assert traffic.keys_read == STEPS * 2 * 2 * 17
    assert traffic.keys_visible == 2 * sum(2 * n - 5 for n in range(PROMPT + 1, PROMPT + STEPS + 1))
    assert traffic.bytes_processed == traffic.keys_read * 16 * 4
    assert traffic.bytes_dense == traffic.keys_visible * 16 * 4
    assert traffic.bytes_scored == traffic.keys_read * 8  # four bytes of the sum and four of the column
    assert traffic.counted_triples == traffic.triples == STEPS * 4 and traffic.retrievals == 0


def test_nothing_is_asked_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "may_look", lambda device: False)
    method = H2O(ratio=0.5, sink=2, local=4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v, rows = text((0, 26))
        store = KVStore()
        store.append(k[:, :, :PROMPT], v[:, :, :PROMPT])
        store.rows, store.notes = rows, watched(method, q, k, rows.pad)
        for step in told(q, k, v, rows):
            store.append(step.k[:, :, -1:], step.v[:, :, -1:])
            method.run(store, step)


def test_a_prompt_that_was_not_seen_is_an_error() -> None:
    q, k, v, rows = text((0,))
    with pytest.raises(ValueError, match="method 'h2o' chooses by the prompt's queries, which it has not seen"):
        H2O(budget=48).decide(told(q, k, v, rows)[0], State())
    notes = watched(H2O(budget=48), q, k, (0,))
    with pytest.raises(ValueError, match="has not seen"):
        SnapKV(budget=49).decide(told(q, k, v, rows)[0], State(notes=notes))
    with pytest.raises(ValueError, match="budget=47 is too small"):
        H2O(budget=47)
