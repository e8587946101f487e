"""SnapKV: what the last queries of a prompt keep of it, and how the cache grows from there."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from prehoc.cache import KVStore
from prehoc.methods import SnapKV, parse_method
from prehoc.selection import Rows, Selection, State, Step
from walking import PROMPT, STEPS, text, told


def kept(q: Tensor, k: Tensor, row: int, head: int, pad: int, total: int, method: SnapKV) -> list[int]:
    """The prompt's columns that stay, one query, key and neighbourhood at a time."""
    prompt = list(range(pad, PROMPT))
    if len(prompt) <= total:
        return prompt
    sums = dict.fromkeys(prompt, 0.0)
    for column in prompt[-method.local :]:
        for g in (2 * head, 2 * head + 1):
            logits = [float(q[row, g, column] @ k[row, head, j]) * 0.4 for j in range(pad, column + 1)]
            top = max(logits)
            whole = sum(math.exp(x - top) for x in logits)
            for j, x in zip(range(pad, column + 1), logits, strict=True):
                sums[j] += math.exp(x - top) / whole
    observed = prompt[: -method.local]
    reach = method.kernel // 2
    score = {j: sum(sums[i] for i in observed if abs(i - j) <= reach) / method.kernel for j in observed}
    always = prompt[: method.sink] + prompt[-method.local :]
    rest = sorted((j for j in observed if j not in always), key=lambda j: (-score[j], j))
    return sorted(always + rest[: total - len(always)])


@pytest.mark.parametrize("pad", [(0,), (0, 5, 30), (20, 32)], ids=["one", "ragged", "short"])
@pytest.mark.parametrize("keys", ["budget=17,kernel=3", "ratio=0.5,sink=2", "budget=20,kernel=1"])
@pytest.mark.parametrize("chunks", [(PROMPT,), (31, 34, PROMPT)], ids=["whole", "chunks"])
def test_what_the_window_attends_to_stays(pad: tuple[int, ...], keys: str, chunks: tuple[int, ...]) -> None:
    method = parse_method(f"snapkv:local=8,{keys}")
    assert isinstance(method, SnapKV)
    q, k, v, rows = text(pad)
    store, notes, begin = KVStore(), State(), 0
    for end in chunks:
        store.append(k[:, :, begin:end], v[:, :, begin:end])
        method.watch(q[:, :, begin:end], store.views()[0], pad, 0.4, store.notes)
        method.watch(q[:, :, begin:end], k[:, :, :end], pad, 0.4, notes)
        begin = end
    store.rows = rows
    state = State(notes=notes)
    for number, step in enumerate(told(q, k, v, rows)):
        whole = method.decide(step, state)
        assert isinstance(whole.selection, Selection)
        store.append(step.k[:, :, -1:], step.v[:, :, -1:])
        now, decision, columns = method.run(store, step)
        for row, p in enumerate(pad):
            total = method.size().critical_for(PROMPT - p)
            assert total is not None
            for head in range(2):
                stay = kept(q, k, row, head, p, method.sink + total + 8, method)
                alive = stay + list(range(PROMPT, PROMPT + number + 1))
                length = int(whole.selection.lengths[row, head])
                assert whole.selection.indices[row, head, :length].tolist() == alive
                assert columns[row, head, now.rows.pad[row] :].tolist() == alive
                assert torch.equal(now.k[row, head, now.rows.pad[row] :], step.k[row, head, alive])
                assert torch.equal(now.v[row, head, now.rows.pad[row] :], step.v[row, head, alive])
            assert decision.evicted[row] == PROMPT - p - len(stay)


def test_memory_is_given_back_and_a_later_turn_is_cut_again() -> None:
    method, (q, k, v, rows) = SnapKV(budget=17, local=8), text((0, 3))
    store = KVStore()
    store.append(k[:, :, :PROMPT], v[:, :, :PROMPT], capacity=4096)
    store.rows = rows
    method.watch(q[:, :, :PROMPT], k[:, :, :PROMPT], rows.pad, 0.4, store.notes)
    before = store.nbytes
    for step in told(q, k, v, rows):
        store.append(step.k[:, :, -1:], step.v[:, :, -1:], capacity=4096)
        method.run(store, step)
    assert store.length == 17 + STEPS and store.nbytes < before / 10
    assert "window" not in store.notes
    views = store.append(k[:, :, :20], v[:, :, :20])  # a second prompt: it sees what the first has left
    assert store.first is not None
    method.watch(q[:, :, :20], views[0], store.first, 0.4, store.notes)
    views = store.append(k[:, :, :1], v[:, :, :1])
    again = Rows(rows.pad, tuple(PROMPT + STEPS + 20 - p for p in rows.pad))
    _, decision, columns = method.run(store, Step(0, q[:, :, 0], *views, 0.4, again, (0, 0)))
    assert store.length == 18 and store.dropped == PROMPT + STEPS + 21 - 18
    assert decision.evicted == (PROMPT + STEPS + 21 - 18, PROMPT + STEPS + 21 - 18 - 3)
    last = PROMPT + STEPS + 20
    assert bool((columns[:, :, -9:] == torch.arange(last - 8, last + 1)).all())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("snapkv:kernel=4", "kernel=4 must be odd"),
        ("snapkv:kernel=0", "kernel=0 must be at least 1"),
        ("snapkv:budget=39", "budget=39 is too small.*give at least 40"),
        ("snapkv:local=0", "local=0 must be at least 1"),
        ("snapkv:mass=0.9", "unknown key 'mass' for method 'snapkv'"),
    ],
)
def test_errors_name_the_value_and_the_fix(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_method(text)
