"""HShare: who shares from whom, and what each head of each layer reads at each step."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from prehoc.books import Books
from prehoc.kernels import host
from prehoc.methods import HShare, parse_method
from prehoc.methods.hshare import assign
from prehoc.selection import Decision, State, Step
from walking import read, steps

LAYERS = 5


def run(
    text: str, pad: tuple[int, ...], prompt: int, count: int, sliding: int = 2
) -> list[list[tuple[Step, Decision]]]:
    """Decide at every step in every layer but the sliding one, ``[step][layer]``."""
    selector, states = parse_method(text).plan().selector, [State() for _ in range(LAYERS)]
    assert selector is not None
    layers = [layer for layer in range(LAYERS) if layer != sliding]
    peers = {layer: states[layer] for layer in layers}
    out: list[list[tuple[Step, Decision]]] = []
    for each in zip(*(steps(pad, prompt, count, layer) for layer in layers), strict=True):
        row = []
        for step in each:
            step = dataclasses.replace(step, peers=peers)
            decision = selector.decide(step, states[step.layer])
            if decision.selection is not None:
                chosen = dataclasses.replace(
                    decision.selection,  # type: ignore[arg-type]
                    indices=decision.selection.indices.clone(),  # type: ignore[union-attr]
                    lengths=decision.selection.lengths.clone(),  # type: ignore[union-attr]
                )
                decision = dataclasses.replace(decision, selection=chosen)
            row.append((step, decision))
        out.append(row)
    return out


def top(step: Step, row: int, head: int, heads: int, k: int, sink: int, local: int) -> set[int]:
    """The exact k best keys of the middle."""
    pad, kv = step.rows.pad[row], head * 2 // heads
    queries = step.q[row, head * (4 // heads) : (head + 1) * (4 // heads)].double()
    shares = torch.log_softmax(queries @ step.k[row, kv, pad:].double().mT * step.scale, -1).amax(0)
    middle = range(pad + sink, step.columns - local)
    return set(sorted(middle, key=lambda j: (-shares[j - pad].item(), j))[:k])


def sources(sets: list[list[set[int]]], keep: int, earlier: bool) -> list[int]:
    """Who takes whose sets: the most similar pair first, a source stays one."""
    overlap = {
        (i, j): sum(len(a & b) for a, b in zip(sets[i], sets[j], strict=True))
        for i, j in itertools.permutations(range(len(sets)), 2)
        if i < j or not earlier
    }
    chosen: dict[int, int] = {}
    while len(chosen) < len(sets) - keep:
        free = {
            (i, j): value for (i, j), value in overlap.items()
            if i not in chosen and j not in chosen and j not in chosen.values()
        }  # fmt: skip
        i, j = min(free, key=lambda pair: (-free[pair], pair[1], pair[0]))
        chosen[j] = i
    return [chosen.get(j, j) for j in range(len(sets))]


@pytest.mark.parametrize("granularity", ["kv_head", "query_head"])
@pytest.mark.parametrize("pad", [(0,), (0, 5, 51)], ids=["one", "ragged"])
@pytest.mark.parametrize("period", [1, 2, 3])
def test_sets_are_shared_between_queries_layers_and_heads(granularity: str, pad: tuple[int, ...], period: int) -> None:
    heads = 2 if granularity == "kv_head" else 4
    text = f"hshare:critical=9,sink=3,local=4,layers=1/2,heads=1/2,queries=1/{period},granularity={granularity}"
    found = run(text, pad, 70, 9)
    for row, begin in enumerate(pad):
        age, held, by_layer = -1, {}, list(range(4))
        by_head: dict[int, list[int]] = {}
        for each in found:
            t = each[0][0].columns - begin
            covered = t - 3 - 4 <= 9
            age = age + 1 if not covered else -1
            if covered:
                assert all(
                    not d.counted[row] and not bool(d.retrieved[row].any()) for _, d in each if d.retrieved is not None
                )
                continue
            if age == 1:  # the first step is over: its sets decide who shares
                by_layer = sources([held[i] for i in range(4)], 2, earlier=True)
                by_head = {i: sources([[s] for s in held[i]], heads // 2, earlier=False) for i in range(4)}
            for i, (step, decision) in enumerate(each):
                assert decision.retrieved is not None
                retrieves = [False] * heads
                if age % period == 0:
                    fresh = [top(step, row, head, heads, 9, 3, 4) for head in range(heads)]
                    if age == 0:
                        held[i], retrieves = fresh, [True] * heads
                    elif by_layer[i] != i:
                        held[i] = held[by_layer[i]]
                    else:
                        held[i] = [fresh[source] for source in by_head[i]]
                        retrieves = [by_head[i][head] == head for head in range(heads)]
                assert decision.retrieved[row].tolist() == retrieves
                always = {*range(begin, begin + 3), *range(step.columns - 4, step.columns)}
                for head in range(heads):
                    assert set(read(decision, row, head)) == held[i][head] | always
        assert age == 8 or begin == 51


def test_the_share_that_retrieves_is_the_product() -> None:
    for name, share in (("hshare-1", 3 / 4), ("hshare-2", 1 / 2), ("hshare-0", 1 / 2)):
        method = parse_method(f"{name}:critical=9,sink=3,local=4")
        assert (method.layers, method.heads, method.queries) == (share, share, 1 / 2)  # type: ignore[attr-defined]
    books = Books()
    found = run("hshare-2:critical=9,sink=3,local=4,granularity=query_head", (0,), 70, 41)
    for each in found[1:]:
        for step, decision in each:
            books.decision(step, 8, decision)
    books.flush()
    assert books.traffic.retrieval_ratio == 1 / 8
    assert books.traffic.bytes_scored == sum(
        each[0][0].columns * 8 * 4 * 4 for each in found[2::2]  # two layers of two heads score K
    )  # fmt: skip


def test_assignment() -> None:
    similar = [[9, 5, 1, 2], [5, 9, 3, 4], [1, 3, 9, 8], [2, 4, 8, 9]]
    assert assign(similar, 1) == [0, 1, 2, 3]
    assert assign(similar, 3 / 4) == [0, 1, 3, 3]  # 2 and 3 are most similar, and 2 is the first that can take
    assert assign(similar, 3 / 4, earlier=True) == [0, 1, 2, 2]
    assert assign(similar, 1 / 2, earlier=True) == [0, 0, 2, 2]
    assert assign(similar, 1 / 4, earlier=True) == [0, 0, 0, 0]  # 2 is a source: it takes only because somebody must
    assert assign(similar, 0.01) == assign(similar, 1 / 4)
    assert assign([[1.0]], 1 / 2) == [0]
    assert assign([[0.0] * 3] * 3, 1 / 2) == [1, 1, 2]  # two of three: halves are rounded up
    for count, keep in itertools.product(range(1, 8), range(1, 8)):
        random = torch.rand(count, count, generator=torch.Generator().manual_seed(count))
        for earlier in (True, False):
            source = assign((random + random.mT).tolist(), min(keep / count, 1.0), earlier)
            assert len(set(source)) == min(keep, count)
            assert all(source[s] == s and (s <= j or not earlier) for j, s in enumerate(source))


def test_a_row_follows_its_own_plan_when_rows_are_reordered() -> None:
    """Rows swapped in the middle of a run go on as they would have."""
    text, pad = "hshare-2:critical=9,sink=3,local=4", (0, 5)
    method = parse_method(text).plan().selector
    assert method is not None
    expected = run(text, pad, 70, 8)
    states = [State() for _ in range(LAYERS)]
    swap = torch.tensor([1, 0])
    for number, each in enumerate(zip(*(steps(pad, 70, 8, layer) for layer in (0, 1, 3, 4)), strict=True)):
        if number == 3:
            states = [state.take(swap) for state in states]
        peers = {layer: state for layer, state in enumerate(states) if layer != 2}
        for i, step in enumerate(each):
            if number >= 3:
                step = dataclasses.replace(
                    step, q=step.q[swap], k=step.k[swap], v=step.v[swap], rows=step.rows.take(swap)
                )
            decision = method.decide(dataclasses.replace(step, peers=peers), states[step.layer])
            for row in range(2):
                old = 1 - row if number >= 3 else row
                assert all(read(decision, row, head) == read(expected[number][i][1], old, head) for head in range(2))


def test_the_path_without_a_look_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "hshare-2:ratio=0.3,sink=3,local=4"
    expected = run(text, (0, 5, 51), 70, 5)
    monkeypatch.setattr(host, "may_look", lambda device: False)
    for one, two in zip(expected, run(text, (0, 5, 51), 70, 5), strict=True):
        for (_, a), (_, b) in zip(one, two, strict=True):
            assert all(read(a, row, head) == read(b, row, head) for row in range(3) for head in range(2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hshare:layers=0", r"layers=0.0 must lie in \(0.0, 1.0\]; 3/4 lets three of four retrieve"),
        ("hshare:heads=1.5", "heads=1.5 must lie in"),
        ("hshare:queries=2", "queries=2.0 must lie in"),
        ("hshare:granularity=x", "unknown granularity 'x'"),
        ("hshare-3", "unknown method 'hshare-3'; did you mean 'hshare-"),
    ],
)
def test_errors_name_the_value_and_the_fix(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_method(text)


def test_one_layer_alone_is_an_error() -> None:
    step = next(steps((0,), 70, 1))
    with pytest.raises(ValueError, match="hshare shares between layers, and this is one layer alone"):
        HShare(critical=9).decide(step, State())
