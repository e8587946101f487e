"""The controls of CIS: random keys instead of neighbours, and a shared set without either."""

from __future__ import annotations

import pytest
import torch

from prehoc.kernels import host
from prehoc.methods import CIS, RandomExpansion, parse_method
from walking import read, walk

KEYS = "sink=2,local=5,critical=12,block_size=4,tau=0.5"


@pytest.mark.parametrize(
    "keys",
    [
        "",
        ",refresh=block",
        ",local_window=sliding",
        ",granularity=query_head",
        ",radius=2",
        ",gate=key",
        ",gate=hidden",
        ",gate=score",
    ],
)
@pytest.mark.parametrize("pad", [(0,), (0, 4, 55)], ids=["one", "ragged"])
def test_as_many_keys_as_dilation_adds_but_others(keys: str, pad: tuple[int, ...]) -> None:
    random = walk(f"random_expansion:{KEYS}{keys}", pad, 70, 14)
    plain = walk(f"cis-8:{KEYS}{keys},dilate=0", pad, 70, 14)
    dilated = walk(f"cis-8:{KEYS}{keys}", pad, 70, 14)
    added, differ = 0, 0
    for (step, one), (_, base), (_, wide) in zip(random, plain, dilated, strict=True):
        assert one.retrieved is not None and base.retrieved is not None
        assert torch.equal(one.retrieved, base.retrieved) and one.counted == base.counted
        for row, begin in enumerate(pad):
            for head in range(one.retrieved.shape[1]):
                got, held, neighbours = (set(read(d, row, head)) for d in (one, base, wide))
                assert held <= got <= set(range(begin, step.columns))
                assert len(got) == len(neighbours)
                added += len(got - held)
                differ += got != neighbours
    assert added and differ


def test_random_keys_stay_for_a_block_and_are_drawn_anew_after_it() -> None:
    """Two heads of one row, three blocks: what a head adds changes exactly where it retrieves."""
    keys = KEYS.replace("tau=0.5", "tau=-1")
    random = walk(f"random_expansion:{keys}", (0,), 70, 12)
    plain = walk(f"cis-8:{keys},dilate=0,radius=0", (0,), 70, 12)
    added = [
        [set(read(one, 0, head)) - set(read(base, 0, head)) for head in range(2)]
        for (_, one), (_, base) in zip(random, plain, strict=True)
    ]
    for number, sets in enumerate(added):
        assert all(sets)
        if number % 4:
            assert sets == added[number - 1]
        elif number:
            assert sets[0] != added[number - 1][0] and sets[1] != added[number - 1][1]
    assert added[0][0] != added[0][1]


def test_the_draw_depends_on_seed_and_layer_and_not_on_the_batch() -> None:
    def lists(text: str, layer: int = 0, pad: tuple[int, ...] = (0,)) -> list[list[int]]:
        return [read(decision, 0, 0) for _, decision in walk(text, pad, 70, 3, layer)]

    text = f"random_expansion:{KEYS}"
    assert lists(text) == lists(text)
    assert lists(text) != lists(f"{text},seed=1")
    method = RandomExpansion(sink=2, local=5, critical=12)
    step, _ = walk(text, (3,), 70, 1)[0]
    alone, _ = walk(text, (0,), 67, 1)[0]
    draws = torch.ones(1, 2, dtype=torch.int64)
    padded, moved = method._priority(step, draws), method._priority(alone, draws)
    assert torch.equal(padded[..., 3:], moved)
    assert bool((padded[..., :3] == torch.iinfo(torch.int64).max).all())
    assert not torch.equal(moved[:, 0], moved[:, 1])


def test_every_key_is_drawn_equally_often() -> None:
    """Chi-squared over 400 draws of 10 keys of 50: its mean is 49 less what drawing without replacement takes."""
    method = RandomExpansion(sink=2, local=5, critical=12)
    step, _ = walk(f"random_expansion:{KEYS}", (0,), 50, 1)[0]
    counts = torch.zeros(51)
    for draw in range(400):
        best = method._priority(step, torch.full((1, 2), draw))[0, 0].topk(10, largest=False).indices
        counts[best] += 1
    expected = 400 * 10 / 51
    assert float(((counts - expected) ** 2 / expected).sum()) < 86  # the 99.9 % point with 50 degrees of freedom


def test_the_path_without_a_look_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = walk(f"random_expansion:{KEYS}", (0, 4, 55), 70, 6)
    monkeypatch.setattr(host, "may_look", lambda device: False)
    found = walk(f"random_expansion:{KEYS}", (0, 4, 55), 70, 6)
    for (_, a), (_, b) in zip(expected, found, strict=True):
        assert all(read(a, row, head) == read(b, row, head) for row in range(3) for head in range(2))


def test_presets_and_errors() -> None:
    assert parse_method("direct_reuse:budget=128") == CIS(budget=128, gate="query", dilate=0, radius=0)
    assert parse_method("random_expansion").gate == parse_method("cis-8").gate  # type: ignore[attr-defined]
    assert parse_method("cis_key:tau=0.1") == CIS(gate="key", tau=0.1)
    assert parse_method("cis_hidden") == CIS(gate="hidden")
    assert parse_method("oracle_topp").size().mass == 0.95  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="matched=true has no random form"):
        RandomExpansion(budget=128, matched=True)
    with pytest.raises(ValueError, match="unknown gate 'keys'; did you mean 'key'"):
        parse_method("cis:gate=keys")
    with pytest.raises(ValueError, match="seed=-1 must be at least 0"):
        RandomExpansion(seed=-1)
