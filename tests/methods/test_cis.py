"""CIS against a slow simulator written from the design: plain loops per row and head, float64, no torch in the rules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prehoc.methods import CIS, CPE, _gate
from prehoc.selection import Decision, Rows, Selection, State, Step

NEAR_TAU = 1e-5  # a cosine this close to tau may fall on either side
NEAR_TIE = 2e-5  # scores this close may swap places (float32 against float64)


@dataclasses.dataclass
class Head:
    """What one (row, head) remembers."""

    anchor: np.ndarray | None = None  # [G, D] raw queries, [G, n] their scores, or [1, W] what else the gate compares
    keys: set[int] = dataclasses.field(default_factory=set)  # dilated set, columns
    window: int = 0  # first column of the local window at the anchor
    age: int = 0  # steps since the own retrieval


class Simulator:
    """Design decision 3, one loop at a time."""

    def __init__(self, cis: CIS, pad: tuple[int, ...], prompt: tuple[int, ...]) -> None:
        self.c, self.pad, self.prompt = cis, pad, prompt
        self.heads: dict[tuple[int, int], Head] = {}
        self.step = -1
        self.excused = 0
        self.compared = 0

    def limit(self, row: int) -> int | None:
        """Critical keys that the stated budget allows."""
        c = self.c
        if c.critical is not None:
            return c.critical
        if c.budget is not None:
            return c.budget - c.sink - c.local
        if c.ratio is not None or c.mass is None:
            ratio = c.ratio if c.ratio is not None else 1 / 8
            return max(int(ratio * self.prompt[row]) - c.sink - c.local, 8)
        return None

    def run(self, step: Step, decision: Decision) -> None:
        """Advance by one step and compare everything with `decision`."""
        c, n = self.c, step.columns
        self.step += 1
        q, k = step.q.double().numpy(), step.k.double().numpy()
        hkv = k.shape[1]
        hs = hkv if c.granularity == "kv_head" else q.shape[1]
        group = q.shape[1] // hs
        counted = []
        for row, pad in enumerate(self.pad):
            t = n - pad
            size = t - c.local - max(c.sink, step.masked[row])
            limit = self.limit(row)
            counted.append(size > 0 and (limit is None or size > limit))
        assert decision.counted == tuple(counted)
        if not any(counted):
            assert decision.selection is None
            self.heads.clear()
            return
        got = decision.selection
        assert isinstance(got, Selection) and decision.retrieved is not None and decision.cosine is not None
        sets = as_sets(got, self.pad, n)
        check_copies(step, got)
        for row, pad in enumerate(self.pad):
            for head in range(hs):
                where = f"step {self.step} row {row} head {head}"
                key = (row, head)
                if not counted[row]:
                    self.heads.pop(key, None)
                    visible = {j for j in range(pad, n) if j - pad < c.sink or j - pad >= step.masked[row]}
                    assert sets[row][head] == visible, where
                    assert not decision.retrieved[row, head], where
                    continue
                mine, keys = q[row, head * group : (head + 1) * group], k[row, head * hkv // hs]  # [G, D], [n, D]
                compared = mine
                if c.gate == "key":
                    compared = keys[-1:]
                elif c.gate == "score":
                    compared = self._scores(mine, keys, row, n)
                elif c.gate == "hidden":
                    assert step.hidden is not None
                    compared = step.hidden[row, None].double().numpy()
                self._head(
                    key,
                    mine,
                    compared,
                    keys,
                    step,
                    sets[row][head],
                    bool(decision.retrieved[row, head]),
                    float(decision.cosine[row, head]),
                    where,
                )

    def _scores(self, q: np.ndarray, k: np.ndarray, row: int, n: int) -> np.ndarray:
        """Return the scores [G, 1024] of evenly spaced keys of the prompt, less their mean: cosines are correlations."""
        pad, prompt = self.pad[row], self.prompt[row] or n - self.pad[row]
        skip = self.c.sink if prompt > self.c.sink + 16 else 0
        places = [pad + skip + i * (prompt - skip) // 1024 for i in range(1024)]
        scores = q @ k[places].T
        return scores * 0 if len(set(places)) == 1 else scores - scores.mean(1, keepdims=True)

    def _head(
        self,
        key: tuple[int, int],
        q: np.ndarray,
        compared: np.ndarray,
        k: np.ndarray,
        step: Step,
        got: set[int],
        retrieved: bool,
        cosine: float,
        where: str,
    ) -> None:
        c, n, row = self.c, step.columns, key[0]
        known = self.heads.get(key)
        self.compared += 1
        least = math.nan
        if known is not None:
            known.age += 1
            assert known.anchor is not None
            least = min(cosine_of(a, b) for a, b in zip(compared, known.anchor, strict=True))
            assert math.isnan(least) == math.isnan(cosine), where
            assert math.isnan(least) or abs(least - cosine) < (NEAR_TAU if c.gate == "score" else 2e-6), where
        else:
            assert math.isnan(cosine), where
        expired = known is None
        if known is not None:
            expired = self.step % c.block_size == 0 if c.refresh == "block" else known.age >= c.block_size
        need = expired or not least > c.tau  # NaN: not greater
        if need != retrieved:
            assert not expired and abs(least - c.tau) < NEAR_TAU, f"{where}: cosine {least}, retrieved {retrieved}"
            self.excused += 1
            need = retrieved
        if not need:
            assert known is not None
            assert got == self._read(known, row, n), where
            return
        chosen, tie = self._retrieve(q, k, step, row)
        fresh = Head(compared, chosen, n - c.local, 0)
        wanted = self._read(fresh, row, n)
        if got != wanted:
            assert tie, f"{where}: read {sorted(got - wanted)} instead of {sorted(wanted - got)}"
            self.excused += 1
            fresh.keys = {j for j in got if self.pad[row] + max(c.sink, step.masked[row]) <= j < n - c.local}
        keeps = c.refresh == "rolling" or self.step % c.block_size == 0 or known is None
        if keeps:
            self.heads[key] = fresh

    def _read(self, head: Head, row: int, n: int) -> set[int]:
        pad = self.pad[row]
        start = head.window if self.c.local_window == "frozen" else n - self.c.local
        return set(range(pad, pad + self.c.sink)) | head.keys | set(range(start, n))

    def _retrieve(self, q: np.ndarray, k: np.ndarray, step: Step, row: int) -> tuple[set[int], bool]:
        """Return the dilated set, and whether a near-tie may have changed it."""
        c, n, pad = self.c, step.columns, self.pad[row]
        begin, end = pad + max(c.sink, step.masked[row]), n - c.local
        visible = np.array([j for j in range(pad, n) if j < pad + c.sink or j >= begin])
        logits = q @ k[visible].T * step.scale  # [G, visible]
        top = logits.max(1, keepdims=True)
        relative = logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))
        inside = (visible >= begin) & (visible < end)
        score = dict(zip(visible[inside].tolist(), relative[:, inside].max(0).tolist(), strict=True))
        place = {j: i for i, j in enumerate(visible.tolist())}
        order = sorted(score, key=lambda j: (-score[j], j))
        limit = self.limit(row)
        cap = len(order) if limit is None else limit
        count, near_mass = cap, False
        if c.mass is not None:
            weight = np.exp(relative)
            held = weight[:, ~inside].sum(1)  # [G]: sinks and local keys
            count = 0
            while count < cap and held.min() < c.mass:
                held = held + weight[:, place[order[count]]]
                near_mass |= abs(held.min() - c.mass) < 1e-5
                count += 1
        room = None
        if c.matched:
            assert limit is not None
            room = limit - (c.block_size - 1 if c.local_window == "frozen" else 0)

        def dilated(some: int) -> set[int]:
            best = some // 3 if c.dilate is None else min(c.dilate, some)
            out = set(order[:some])
            for p in order[:best]:
                out |= {j for j in range(p - c.radius, p + c.radius + 1) if begin <= j < end}
            return out

        if room is not None:
            while count > 0 and len(dilated(count)) > room:
                count -= 1
        scores = [score[j] for j in order[: cap + 1]]
        tie = near_mass or any(0 <= a - b < NEAR_TIE for a, b in zip(scores, scores[1:], strict=False))
        return dilated(count), tie


def cosine_of(a: np.ndarray, b: np.ndarray) -> float:
    norm = math.sqrt(float(a @ a)) * math.sqrt(float(b @ b))
    return math.nan if norm == 0 else min(float(a @ b) / norm, 1.0)


def as_sets(selection: Selection, pad: tuple[int, ...], n: int) -> list[list[set[int]]]:
    """Check the form (ascending, unique, -1 padding at the end, within [pad, n)) and return sets of columns."""
    indices, lengths = selection.indices, selection.lengths
    assert indices.dtype == torch.int32
    assert not selection.full or int(lengths.min()) == indices.shape[2]
    out = []
    for row, first in enumerate(pad):
        out.append([])
        for head in range(indices.shape[1]):
            length = int(lengths[row, head])
            used, rest = indices[row, head, :length].tolist(), indices[row, head, length:].tolist()
            assert used == sorted(set(used)), (row, head, used)
            assert not used or (used[0] >= first and used[-1] < n), (row, head, used)
            assert all(x == -1 for x in rest) or not rest, (row, head, rest)
            out[-1].append(set(used))
    return out


def check_copies(step: Step, selection: Selection) -> None:
    """Keys and values that the selector hands over are those of the cache at its indices."""
    keys, values = getattr(selection, "keys", None), getattr(selection, "values", None)
    assert (keys is None) == (values is None)
    if keys is None:
        return
    indices = selection.indices.long()
    share = indices.shape[1] // step.k.shape[1]
    for source, copy in ((step.k, keys), (step.v, values)):
        assert copy.shape[:3] == indices.shape and copy.dtype == source.dtype
        assert bool(copy.isfinite().all())  # padding too: zero weight times NaN is NaN
        wanted = source.repeat_interleave(share, 1).gather(2, indices.clamp(min=0)[..., None].expand_as(copy))
        used = (indices >= 0)[..., None].expand_as(copy)
        assert torch.equal(copy[used], wanted[used])


@dataclasses.dataclass
class Walk:
    """Queries and hidden states that drift and keys that grow."""

    b: int = 3
    hkv: int = 2
    group: int = 2
    d: int = 16
    prompt: int = 60
    steps: int = 18
    pad: tuple[int, ...] | None = None
    drift: float = 0.35
    seed: int = 0
    integer: bool = False
    masked: Callable[[int], int] = staticmethod(lambda t: 0)
    scale: float = 0.25
    dtype: torch.dtype = torch.float32
    backend: str = "reference"

    @property
    def pads(self) -> tuple[int, ...]:
        return self.pad or (0,) * self.b

    @property
    def rows(self) -> Rows:
        return Rows(self.pads, tuple(self.prompt - p for p in self.pads))

    def __iter__(self) -> Iterator[Step]:
        random = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            x = torch.randn(*shape, generator=random)
            return (2 * x).round().clamp(-3, 3) if self.integer else x

        cap = self.prompt + self.steps
        k = normal(self.b, self.hkv, cap + 5, self.d).to(self.dtype)
        q = normal(self.b, self.hkv * self.group, self.d)
        v = torch.randn(self.b, self.hkv, cap + 5, 6, generator=torch.Generator().manual_seed(self.seed)).to(self.dtype)
        apart = torch.Generator().manual_seed(self.seed + 1)  # hidden states
        hidden = torch.randn(self.b, 12, generator=apart)
        for i in range(self.steps):
            if not self.integer:
                q = q * math.sqrt(1 - self.drift**2) + self.drift * normal(*q.shape)
                jump = torch.rand(q.shape[:2], generator=random) < 0.04
                q = torch.where(jump[..., None], normal(*q.shape), q)
            else:
                change = torch.rand(q.shape, generator=random) < 0.06
                q = torch.where(change, normal(*q.shape), q)
            change = torch.randn(hidden.shape, generator=apart)
            hidden = hidden * math.sqrt(1 - self.drift**2) + self.drift * change
            n = self.prompt + i + 1
            masked = tuple(self.masked(n - p) for p in self.pads)
            kv, now = (k[:, :, :n], v[:, :, :n]), hidden.to(self.dtype)
            yield Step(0, q.to(self.dtype), *kv, self.scale, self.rows, masked, self.backend, hidden=now)


def window(share: float, local: int) -> Callable[[int], int]:
    return lambda t: max(0, min(math.floor(share * t), t - local))


BASE: dict[str, Any] = {"sink": 2, "local": 5, "critical": 9, "block_size": 4, "tau": 0.8}
READINGS = [
    {"refresh": refresh, "local_window": local, "granularity": granularity}
    for refresh in ("rolling", "block")
    for local in ("frozen", "sliding")
    for granularity in ("kv_head", "query_head")
]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no dilation": {"dilate": 0},
    "dilate 4, radius 2": {"dilate": 4, "radius": 2},
    "dilate more than critical": {"dilate": 20, "radius": 3},
    "radius 0": {"radius": 0},
    "matched": {"matched": True},
    "matched, dilate 5": {"matched": True, "dilate": 5, "radius": 2},
    "matched, no room": {"matched": True, "critical": 4, "block_size": 6},
    "mass": {"mass": 0.8, "critical": None},
    "mass with cap": {"mass": 0.9, "critical": 12},
    "low mass": {"mass": 0.05, "critical": 12},
    "mass, matched": {"mass": 0.7, "critical": 20, "matched": True},
    "low mass, matched": {"mass": 0.1, "critical": 12, "matched": True},
    "no sinks": {"sink": 0},
    "local 1": {"local": 1},
    "block of 1": {"block_size": 1},
    "long block": {"block_size": 16, "tau": 0.3},
    "tau -1": {"tau": -1.0},
    "tau 1": {"tau": 1.0},
    "total": {"critical": None, "budget": 24},
    "ratio": {"critical": None, "ratio": 0.4},
    "ratio, matched": {"critical": None, "ratio": 0.3, "matched": True, "block_size": 12},
    # keys of neighbouring tokens are drawn apart: few cosines are large. No cosine of small integers is .13 exactly
    "gate on keys": {"gate": "key", "tau": 0.13},
    "gate on hidden states": {"gate": "hidden"},
    "gate on queries": {"gate": "query"},
    "gate on queries, matched, long block": {
        "gate": "query",
        "tau": 0.4,
        "critical": 20,
        "matched": True,
        "block_size": 12,
    },
    "gate on keys, mass, matched": {"gate": "key", "tau": 0.13, "mass": 0.7, "critical": 20, "matched": True},
    "gate on hidden states, long block": {"gate": "hidden", "tau": 0.7, "block_size": 16, "dilate": 4},
}
WALKS: dict[str, Walk] = {
    "plain": Walk(),
    "one row": Walk(b=1, group=3, seed=1),
    "no groups": Walk(b=2, hkv=3, group=1, seed=2),
    "ragged": Walk(pad=(0, 17, 38), seed=3),
    "covered rows turn": Walk(pad=(0, 40, 47), seed=4),
    "all covered first": Walk(prompt=10, seed=5, steps=24),
    "depth window": Walk(masked=window(0.45, 5), seed=6),
    "ragged depth window": Walk(masked=window(0.6, 5), pad=(3, 0, 31), seed=7, b=3),
    "all but local hidden": Walk(masked=window(0.999, 5), seed=8),
    "exact ties": Walk(integer=True, d=8, seed=9),
    "exact ties, no groups": Walk(integer=True, d=4, group=1, hkv=2, seed=10, pad=(0, 9, 30)),
    "slow": Walk(drift=0.12, seed=11),
    "fast": Walk(drift=0.9, seed=12),
}


def simulate(cis: CIS, walk: Walk) -> Simulator:
    simulator, state = Simulator(cis, walk.pads, walk.rows.prompt), State()
    for step in walk:
        simulator.run(step, cis.decide(step, state))
    return simulator


def cases() -> Iterator[Any]:
    """The product of variants, readings and walks; fast: each pair with a reading once."""
    for i, (variant, keys) in enumerate(VARIANTS.items()):
        for j, reading in enumerate(READINGS):
            for w, walk in enumerate(WALKS):
                fast = (i + j) % len(WALKS) == w or (i == 0 and (w + j) % 2)
                marks = () if fast else (pytest.mark.slow,)
                for backend in ("auto", "reference"):
                    if fast and backend == ("auto", "reference")[(i // 8 + j + w) % 2]:
                        continue
                    name = f"{variant}-{j}-{walk}-{backend}"
                    yield pytest.param({**BASE, **reading, **keys}, walk, backend, id=name, marks=marks)


@pytest.mark.parametrize(("keys", "walk", "backend"), list(cases()))
def test_equals_the_simulator(keys: dict[str, Any], walk: str, backend: str) -> None:
    simulator = simulate(CIS(**keys), dataclasses.replace(WALKS[walk], backend=backend))
    if WALKS[walk].integer and WALKS[walk].group == 1 and keys.get("mass") is None:
        assert simulator.excused == 0  # exact arithmetic: ties are bit-equal
    assert simulator.excused <= max(3, 0.02 * simulator.compared)


def test_excused_cases_are_few() -> None:
    total = [simulate(CIS(**{**BASE, **reading}), Walk(seed=100 + i)) for i, reading in enumerate(READINGS)]
    assert sum(s.excused for s in total) <= 0.01 * sum(s.compared for s in total)


@pytest.mark.parametrize("wrong", [{"tau": 0.7}, {"gate": "key"}, {"gate": "hidden"}, {"gate": "query"}])
def test_simulator_sees_a_wrong_gate(wrong: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        walk = WALKS["plain"]
        simulator, state = Simulator(CIS(**BASE), walk.pads, walk.rows.prompt), State()
        other = CIS(**{**BASE, **wrong})
        for step in walk:
            simulator.run(step, other.decide(step, state))


@pytest.mark.parametrize("gate", [{}, {"gate": "key", "tau": -0.2}, {"gate": "hidden", "tau": 0.87}, {"gate": "query"}])
def test_all_paths_are_taken(gate: dict[str, Any]) -> None:
    """The walks share, fail the gate, expire and start covered: a simulator that sees one path only proves little."""
    cis, walk, state = CIS(**{**BASE, **gate}), Walk(steps=40), State()
    seen = {"shared": 0, "failed": 0, "retrieved": 0}
    for step in walk:
        decision = cis.decide(step, state)
        assert decision.retrieved is not None and decision.cosine is not None
        failed = decision.cosine <= cis.tau
        seen["failed"] += int((decision.retrieved & failed).sum())
        seen["retrieved"] += int(decision.retrieved.sum())
        seen["shared"] += int((~decision.retrieved).sum())
    assert seen["shared"] > 20 and seen["failed"] > 20 and seen["retrieved"] > seen["failed"] + 10


# ---------------------------------------------------------------------------------------------------------- properties

sizes = st.fixed_dictionaries(
    {
        "sink": st.integers(0, 6),
        "local": st.integers(1, 8),
        "critical": st.integers(1, 20),
        "block_size": st.integers(1, 6),
        "tau": st.sampled_from([-1.0, 0.0, 0.5, 0.8, 0.95, 1.0]),
        "radius": st.integers(0, 3),
        "dilate": st.none() | st.integers(0, 8),
        "refresh": st.sampled_from(["rolling", "block"]),
        "local_window": st.sampled_from(["frozen", "sliding"]),
        "granularity": st.sampled_from(["kv_head", "query_head"]),
        "matched": st.booleans(),
        "mass": st.none() | st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
        "gate": st.sampled_from(["score", "score", "score", "query", "query", "key", "hidden"]),
    }
)
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(
    keys=sizes,
    seed=st.integers(0, 2**16),
    prompt=st.integers(1, 50),
    pads=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    share=st.sampled_from([0.0, 0.3, 0.8]),
    shape=st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1)]),
)
def test_any_configuration_equals_the_simulator(
    keys: dict[str, Any],
    seed: int,
    prompt: int,
    pads: tuple[int, int],
    share: float,
    shape: tuple[int, int],
) -> None:
    pad = tuple(min(p, prompt - 1) for p in pads)
    walk = Walk(
        b=2,
        hkv=shape[0],
        group=shape[1],
        d=8,
        prompt=prompt,
        steps=10,
        pad=pad,
        seed=seed,
        masked=window(share, keys["local"]),
    )
    simulate(CIS(**keys), walk)


@quick
@given(keys=sizes, seed=st.integers(0, 2**16))
def test_sinks_and_local_keys_are_always_read(keys: dict[str, Any], seed: int) -> None:
    cis, state, walk = CIS(**keys), State(), Walk(pad=(0, 11, 25), steps=12, prompt=40, seed=seed)
    for step in walk:
        decision = cis.decide(step, state)
        if decision.selection is None:
            continue
        assert isinstance(decision.selection, Selection)
        for pad, row in zip(walk.pads, as_sets(decision.selection, walk.pads, step.columns), strict=True):
            always = set(range(pad, pad + cis.sink)) | set(range(max(step.columns - cis.local, pad), step.columns))
            assert all(always <= head for head in row)


@quick
@given(keys=sizes, seed=st.integers(0, 2**16), prompt=st.integers(1, 40))
def test_a_budget_that_covers_the_context_is_dense(keys: dict[str, Any], seed: int, prompt: int) -> None:
    walk = Walk(prompt=prompt, steps=6, seed=seed, b=2, pad=(0, prompt // 2))
    cis, state = CIS(**{**keys, "critical": prompt + 6}), State()
    assert all(cis.decide(step, state).selection is None for step in walk)


def retained(step: Step, selection: Selection, row: int, head: int) -> list[float]:
    """Attention mass of the selected keys, for each query head of the group."""
    hs, hkv, h = selection.indices.shape[1], step.k.shape[1], step.q.shape[1]
    pad = step.rows.pad[row]
    out = []
    for g in range(h // hs):
        q = step.q[row, head * (h // hs) + g].double()
        logits = step.k[row, head * hkv // hs, pad:].double() @ q * step.scale
        weights = torch.softmax(logits, -1)
        used = selection.indices[row, head, : int(selection.lengths[row, head])].long() - pad
        out.append(float(weights[used].sum()))
    return out


@quick
@given(keys=sizes, seed=st.integers(0, 2**16), more=st.integers(1, 30))
def test_more_budget_never_retains_less_at_an_anchor(keys: dict[str, Any], seed: int, more: int) -> None:
    """With no dilation the sets are nested; with dilation m grows with k, so they are nested too (not when matched)."""
    keys = {**keys, "matched": False}
    step = next(iter(Walk(prompt=70, seed=seed, b=2)))
    small = CIS(**keys).decide(step, State()).selection
    large = CIS(**{**keys, "critical": keys["critical"] + more}).decide(step, State()).selection
    assert isinstance(small, Selection)
    if large is None:
        return
    assert isinstance(large, Selection)
    for row in range(2):
        for head in range(small.indices.shape[1]):
            for a, b in zip(retained(step, small, row, head), retained(step, large, row, head), strict=True):
                assert b >= a - 1e-9


@quick
@given(keys=sizes, seed=st.integers(0, 2**16))
def test_mass_is_retained_at_an_anchor(keys: dict[str, Any], seed: int) -> None:
    """Every query head of the group retains the stated mass when no cap stands in the way."""
    mass = keys["mass"] or 0.7
    keys = {**keys, "mass": mass, "critical": None, "matched": False}
    step = next(iter(Walk(prompt=50, seed=seed, b=2, pad=(0, 13))))
    selection = CIS(**keys).decide(step, State()).selection
    assert isinstance(selection, Selection)
    for row in range(2):
        for head in range(selection.indices.shape[1]):
            assert min(retained(step, selection, row, head)) >= mass - 1e-5


@quick
@given(keys=sizes, seed=st.integers(0, 2**16))
def test_matched_never_reads_more_than_its_total(keys: dict[str, Any], seed: int) -> None:
    """The stated total holds at every step of every block, unless sinks and the growing window alone exceed it."""
    keys = {**keys, "matched": True}
    cis, state, walk = CIS(**keys), State(), Walk(prompt=50, steps=12, seed=seed, b=2, pad=(0, 6))
    growth = cis.block_size - 1 if cis.local_window == "frozen" else 0
    total = cis.sink + cis.local + max(keys["critical"], growth)
    for step in walk:
        selection = cis.decide(step, state).selection
        if isinstance(selection, Selection):
            assert int(selection.lengths.max()) <= total


@quick
@given(keys=sizes, seed=st.integers(0, 2**16), share=st.sampled_from([0.0, 0.5]))
def test_padded_rows_equal_the_rows_alone(keys: dict[str, Any], seed: int, share: float) -> None:
    pads = (0, 14, 29)
    walk = Walk(pad=pads, prompt=45, steps=10, seed=seed, masked=window(share, keys["local"]))
    cis, state, alone = CIS(**keys), State(), [State() for _ in pads]
    for step in walk:
        together = cis.decide(step, state)
        for row, pad in enumerate(pads):
            one = Step(
                0,
                step.q[row : row + 1],
                step.k[row : row + 1, :, pad:],
                step.v[row : row + 1, :, pad:],
                step.scale,
                Rows((0,), (step.rows.prompt[row],)),
                step.masked[row : row + 1],
                hidden=None if step.hidden is None else step.hidden[row : row + 1],
            )
            single = cis.decide(one, alone[row])
            assert single.counted[0] == together.counted[row]
            if together.selection is None:
                assert single.selection is None
                continue
            assert isinstance(together.selection, Selection)
            rows = as_sets(together.selection, pads, step.columns)[row]
            if single.selection is None:
                visible = {j for j in range(pad, step.columns) if j - pad < cis.sink or j - pad >= step.masked[row]}
                assert all(head == visible for head in rows)
                continue
            assert isinstance(single.selection, Selection)
            own = as_sets(single.selection, (0,), step.columns - pad)[0]
            assert [{j + pad for j in head} for head in own] == rows
            assert single.retrieved is not None and together.retrieved is not None
            assert torch.equal(single.retrieved[0], together.retrieved[row])


def take(step: Step, index: torch.Tensor) -> Step:
    return dataclasses.replace(
        step,
        q=step.q[index],
        k=step.k[index],
        v=step.v[index],
        rows=step.rows.take(index),
        masked=tuple(step.masked[i] for i in index.tolist()),
        hidden=None if step.hidden is None else step.hidden[index],
    )


@pytest.mark.parametrize("reading", [*READINGS, {"gate": "key", "tau": 0.13}, {"gate": "hidden"}])
def test_state_follows_the_rows(reading: dict[str, Any]) -> None:
    """Reordered and repeated rows (beam search) decide exactly as they would have in their old place."""
    walk = Walk(pad=(0, 12, 44), seed=21, steps=20)
    cis, state = CIS(**{**BASE, **reading}), State()
    order = torch.tensor([0, 1, 2])
    moved = State()
    swaps = {3: [2, 0, 1], 4: [1, 1, 2], 9: [0, 2, 2, 1], 17: [3, 0]}
    for i, step in enumerate(walk):
        if i in swaps:
            index = torch.tensor(swaps[i])
            order, moved = order[index], moved.take(index)
        decision = cis.decide(step, state)
        assert isinstance(decision.selection, Selection)
        wanted = as_sets(decision.selection, walk.pads, step.columns)
        other = cis.decide(take(step, order), moved)
        if other.selection is None:  # the rows that are left are covered
            assert not any(decision.counted[j] for j in order.tolist())
            continue
        assert isinstance(other.selection, Selection)
        pads = tuple(walk.pads[j] for j in order.tolist())
        got = as_sets(other.selection, pads, step.columns)
        assert got == [wanted[j] for j in order.tolist()]
        assert decision.retrieved is not None and other.retrieved is not None
        assert torch.equal(decision.retrieved[order], other.retrieved)


def test_taken_state_is_independent() -> None:
    walk = Walk(seed=22, steps=12)
    cis, state, twin = CIS(**BASE), State(), State()
    for i, step in enumerate(walk):
        decision = cis.decide(step, state)
        if i == 5:
            twin = state.take(torch.arange(walk.b))
            frozen = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in twin.items()}
    assert isinstance(decision.selection, Selection)
    for k, v in frozen.items():
        assert torch.equal(twin[k], v) if isinstance(v, torch.Tensor) and not v.isnan().any() else True
    assert twin["step"] == 5


# ---------------------------------------------------------------------------------------------------------- single rules


@pytest.mark.parametrize("granularity", ["kv_head", "query_head"])
@pytest.mark.parametrize("tau", [-1.0, -0.5, 0.8])
def test_zero_queries_never_share(granularity: Any, tau: float) -> None:
    cis, state = CIS(**{**BASE, "granularity": granularity, "tau": tau}), State()
    for i, step in enumerate(Walk(seed=30, b=1, hkv=2, group=2, steps=8, drift=0.05)):
        step.q[0, 1] = 0.0
        decision = cis.decide(step, state)
        assert isinstance(decision.selection, Selection)
        assert decision.retrieved is not None and decision.cosine is not None
        head = 0 if granularity == "kv_head" else 1
        assert decision.retrieved[0, head], i
        assert math.isnan(decision.cosine[0, head])
        as_sets(decision.selection, (0,), step.columns)


@pytest.mark.parametrize("granularity", ["kv_head", "query_head"])
@pytest.mark.parametrize("gate", ["key", "hidden"])
def test_what_heads_share_of_a_gate_is_held_and_read_once(gate: Any, granularity: Any) -> None:
    """Two KV heads of three query heads each: a key speaks for its three, a hidden state for the whole row."""
    cis, state = CIS(**{**BASE, "gate": gate, "tau": 0.13, "granularity": granularity}), State()
    size = {"key": (3, 2, 16), "hidden": (3, 1, 12)}[gate]
    together = 1 if gate == "hidden" else 2
    seen = []
    for step in Walk(hkv=2, group=3, d=16):
        decision = cis.decide(step, state)
        assert decision.retrieved is not None and decision.anchors == math.prod(size) * 4
        assert tuple(state["anchor"].shape) == size
        groups = decision.retrieved.view(3, together, -1)
        assert bool((groups == groups[..., :1]).all())
        seen.append(groups[..., 0])
    assert bool(torch.stack(seen)[1:].any()) and not bool(torch.stack(seen)[1:].all())


@pytest.mark.parametrize("tau", [-1.0, 0.8])
@pytest.mark.parametrize("gate", ["key", "hidden"])
def test_what_has_no_direction_never_shares(gate: Any, tau: float) -> None:
    cis, state = CIS(**{**BASE, "gate": gate, "tau": tau}), State()
    for step in Walk(seed=30, b=2, steps=6, drift=0.05):
        assert step.hidden is not None
        (step.k[0, :, -1] if gate == "key" else step.hidden[0]).zero_()
        decision = cis.decide(step, state)
        assert decision.retrieved is not None and decision.cosine is not None
        assert bool(decision.retrieved[0].all()) and bool(decision.cosine[0].isnan().all())


def test_the_queries_of_other_gates_do_not_matter() -> None:
    """Keys and hidden states stay, queries turn around: every set is shared for a whole block."""
    for gate in ("key", "hidden"):
        cis, state, first = CIS(**{**BASE, "gate": gate}), State(), None
        for i, step in enumerate(Walk(seed=31, steps=9)):
            first = first or step
            assert step.hidden is not None and first.hidden is not None
            step.k[:, :, -1], step.hidden[:] = first.k[:, :, -1], first.hidden
            step.q.mul_((-1) ** i)
            decision = cis.decide(step, state)
            assert decision.retrieved is not None
            assert bool(decision.retrieved.all()) == bool(decision.retrieved.any()) == (i % 4 == 0)


def test_the_axes_of_the_keys_are_those_of_their_covariance() -> None:
    """More keys than are sampled, more axes than are kept, ragged rows: the best 16 of each KV head, whoever asks and when."""
    random = torch.Generator().manual_seed(40)
    wide = torch.randn(2, 3, 2100, 24, generator=random) * torch.linspace(3, 0.1, 24) + 5
    rows = Rows((0, 37), (2080, 2043))
    step = Step(0, torch.randn(2, 6, 24, generator=random), wide[:, :, :2090], wide, 0.2, rows, (0, 0))
    found = _gate.axes(step, sink=8)
    assert found.shape == (2, 3, 24, 16)
    for row, (pad, prompt) in enumerate(zip(rows.pad, rows.prompt, strict=True)):
        places = [pad + 8 + i * (prompt - 8) // 1024 for i in range(1024)]
        for head in range(3):
            cov = np.cov(wide[row, head, places].double().numpy().T, bias=True)
            values, vectors = np.linalg.eigh(cov)
            best = vectors[:, -16:] * values[-16:] @ vectors[:, -16:].T
            mine = found[row, head].double().numpy()
            np.testing.assert_allclose(mine @ mine.T, best, atol=1e-4 * values[-1])
    later = dataclasses.replace(step, k=wide)
    alone = dataclasses.replace(step, q=step.q[1:], k=wide[1:, :, 37:], rows=Rows((0,), (2043,)), masked=(0,))
    assert torch.equal(_gate.axes(later, sink=8), found)
    torch.testing.assert_close(_gate.axes(alone, sink=8)[0], found[1])


@pytest.mark.parametrize("granularity", ["kv_head", "query_head"])
def test_a_native_step_sees_queries_along_fewer_axes_than_they_have(granularity: Any) -> None:
    """16 axes of 80: the native step and the torch path find the same cosines, and so the same sets."""
    keys = {**BASE, "gate": "score", "granularity": granularity}
    native, torch_path, shared = State(), State(), 0
    for step in Walk(seed=34, steps=12, d=80, scale=80**-0.5, pad=(0, 3, 20)):
        one = CIS(**keys).decide(step, native)
        other = CIS(**keys).decide(dataclasses.replace(step, backend="reference"), torch_path)
        assert one.cosine is not None and other.cosine is not None and one.retrieved is not None
        torch.testing.assert_close(one.cosine, other.cosine, atol=1e-5, rtol=0, equal_nan=True)
        assert torch.equal(one.retrieved, other.retrieved)  # type: ignore[arg-type]
        shared += int((~one.retrieved).sum())
    assert native["anchor"].shape[2] == 16 and shared


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_finding_the_axes_is_booked_once(backend: str) -> None:
    cis, state = CIS(**{**BASE, "gate": "score"}), State()
    for i, step in enumerate(Walk(seed=35, steps=3, backend=backend)):
        decision = cis.decide(step, state)
        keys = sum(step.columns - pad for pad in step.rows.pad)
        assert decision.summaries == (keys * step.k.shape[1] * 16 * 4 if i == 0 else 0), "fewer keys than are sampled"


def test_a_broken_row_does_not_end_the_axes_of_the_others() -> None:
    (step,) = Walk(seed=36, steps=1)
    wanted = _gate.axes(step, sink=2)
    for broken in (torch.nan, torch.inf, 3e38):
        step.k[2, 0, 30] = broken
        found = _gate.axes(step, sink=2)
        assert torch.equal(found[:2], wanted[:2]) and bool(found.isfinite().all())


def test_prompts_of_one_key_have_no_axes() -> None:
    """1,024 copies of a key differ by rounding: eigenvectors of that need not converge."""
    k = torch.randn(64, 3, 1, 64, generator=torch.Generator().manual_seed(5)) * torch.logspace(-3, 3, 64)
    one = tuple([0] * 64), tuple([1] * 64)
    step = Step(0, k[:, :, 0], k, k, 0.125, Rows(*one), one[0])
    assert not _gate.axes(step, sink=8).any()


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_queries_that_only_move_every_score_alike_share(backend: str) -> None:
    """The softmax does not see what a query adds to all scores, nor does the gate, however far the query turns."""
    cis, state, first = CIS(**{**BASE, "gate": "score", "tau": 0.999}), State(), None
    for i, step in enumerate(Walk(seed=32, steps=9, backend=backend)):
        first = first or step
        step.k[..., 0] = 4.0  # along this axis all keys are the same
        step.q.copy_(first.q)
        step.q[..., 0] += 50.0 * (i % 3)
        decision = cis.decide(step, state)
        assert decision.retrieved is not None
        assert bool(decision.retrieved.all()) == bool(decision.retrieved.any()) == (i % 4 == 0)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_keys_that_do_not_differ_give_no_gate(backend: str) -> None:
    cis, state = CIS(**{**BASE, "gate": "score", "tau": -1.0}), State()
    for step in Walk(seed=33, steps=6, backend=backend):
        step.k[:] = step.k[:, :, 7:8]
        decision = cis.decide(step, state)
        assert decision.retrieved is not None and decision.cosine is not None
        assert bool(decision.retrieved.all()) and bool(decision.cosine.isnan().all())
        h, w = step.q.shape[1], 16
        assert decision.anchors == 4 * len(step.q) * (h * w + step.k.shape[1] * 16 * w), "anchors and axes are read"


def test_a_step_without_hidden_states_is_refused() -> None:
    step = dataclasses.replace(next(iter(Walk())), hidden=None)
    with pytest.raises(
        ValueError, match=r"gate=hidden compares the hidden states.*run the whole model.*gate=score, query or key"
    ):
        CIS(**BASE, gate="hidden").decide(step, State())
    assert CIS(**BASE, gate="key").decide(step, State()).selection is not None


def test_equal_queries_share_for_a_whole_block() -> None:
    for s in (1, 2, 5, 8):
        cis, state = CIS(**{**BASE, "block_size": s}), State()
        steps = list(Walk(b=1, seed=31, steps=3 * s + 1))
        pattern = []
        for step in steps:
            step.q.copy_(steps[0].q)
            decision = cis.decide(step, state)
            assert decision.retrieved is not None
            pattern.append(bool(decision.retrieved.all()))
            assert bool(decision.retrieved.any()) == pattern[-1]
        assert pattern == [i % s == 0 for i in range(3 * s + 1)]


def test_tau_one_never_shares_even_equal_queries() -> None:
    """A cosine is at most 1: rounding must not carry it above tau = 1."""
    for seed in range(20):
        cis, state = CIS(**{**BASE, "tau": 1.0}), State()
        steps = list(Walk(seed=seed, steps=3, d=64))
        for step in steps:
            step.q.copy_(steps[0].q)
            decision = cis.decide(step, state)
            assert decision.retrieved is not None and decision.cosine is not None
            assert bool(decision.retrieved.all())
            assert not bool((decision.cosine > 1).any())


def test_scale_of_a_query_does_not_matter() -> None:
    """Sharing looks at the angle alone, over the whole range of a 16-bit type."""
    for factor in (1e-4, 1.0, 1e3):
        cis, state = CIS(**BASE), State()
        steps = list(Walk(seed=33, steps=2))
        steps[1].q.copy_(steps[0].q * factor)
        for i, step in enumerate(steps):
            decision = cis.decide(step, state)
            assert decision.retrieved is not None
            assert bool(decision.retrieved.any()) == (i == 0)


def test_block_refresh_returns_to_the_blocks_set() -> None:
    cis, state = CIS(**{**BASE, "refresh": "block", "block_size": 6, "local_window": "sliding"}), State()
    steps = list(Walk(b=1, hkv=1, group=1, seed=34, steps=6))
    middle = []
    for i, step in enumerate(steps):
        step.q.copy_(-steps[0].q if i == 3 else steps[0].q)
        decision = cis.decide(step, state)
        assert isinstance(decision.selection, Selection) and decision.retrieved is not None
        assert bool(decision.retrieved) == (i in (0, 3))
        keys = as_sets(decision.selection, (0,), step.columns)[0][0]
        middle.append({j for j in keys if 2 <= j < steps[0].columns - 5})
    assert middle[3] != middle[0]
    assert middle[4] == middle[5] == middle[0]


def test_rolling_refresh_moves_the_anchor() -> None:
    cis, state = CIS(**{**BASE, "block_size": 6}), State()
    steps = list(Walk(b=1, hkv=1, group=1, seed=35, steps=10))
    pattern = []
    for i, step in enumerate(steps):
        step.q.copy_(-steps[0].q if i >= 3 else steps[0].q)
        decision = cis.decide(step, state)
        assert decision.retrieved is not None
        pattern.append(bool(decision.retrieved))
    assert pattern == [True, False, False, True, False, False, False, False, False, True]


def test_blocks_count_from_the_first_decode_step_covered_or_not() -> None:
    """refresh=block: a row that is covered at first joins the common block grid."""
    cis, state = CIS(**{**BASE, "refresh": "block", "block_size": 4, "tau": -1.0}), State()
    first = 2 + 5 + 9 - 2  # three covered steps: 14 + 1 .. 14 + 2
    steps = list(Walk(b=1, hkv=1, group=1, prompt=first - 1, steps=12, seed=36))
    seen = []
    for step in steps:
        step.q.copy_(steps[0].q)
        decision = cis.decide(step, state)
        seen.append(None if decision.selection is None else bool(decision.retrieved))
    covered = seen.index(True)
    assert seen[:covered] == [None] * covered and covered == 3
    assert seen[covered:] == [i == covered or i % 4 == 0 for i in range(covered, 12)]


def test_cpe_selects_as_cis_does() -> None:
    walk = WALKS["ragged depth window"]
    one, two = State(), State()
    cis, cpe = CIS(**BASE), CPE(**BASE).plan().selector
    assert cpe is not None
    for step in walk:
        a, b = cis.decide(step, one).selection, cpe.decide(step, two).selection
        assert isinstance(a, Selection) and isinstance(b, Selection)
        assert torch.equal(a.indices, b.indices) and torch.equal(a.lengths, b.lengths)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_queries_and_keys_are_scored_in_float32(dtype: torch.dtype) -> None:
    """The simulator reads the same 16-bit values in float64: nothing but float32 rounding may separate the two."""
    for scale in (0.25, 64**-0.5 * 1.1, 80**-0.5):
        for granularity in ("kv_head", "query_head"):
            simulator = simulate(
                CIS(**{**BASE, "granularity": granularity, "gate": "query"}),  # 16 axes are not all of 80
                Walk(dtype=dtype, seed=40, scale=scale, d=80, pad=(0, 3, 20)),
            )
            assert simulator.excused <= 0.02 * simulator.compared


def test_many_steps_do_not_overflow_the_lists() -> None:
    """Long runs with failing gates at odd times never lose the newest key."""
    for reading in READINGS:
        cis, state = CIS(**{**BASE, **reading, "block_size": 3}), State()
        for step in Walk(b=2, steps=90, prompt=30, seed=50, pad=(0, 18), drift=0.5):
            decision = cis.decide(step, state)
            if isinstance(decision.selection, Selection):
                for row in as_sets(decision.selection, (0, 18), step.columns):
                    assert all(step.columns - 1 in head for head in row)


def test_nothing_is_nan_with_extreme_keys() -> None:
    cis, state = CIS(**{**BASE, "mass": 0.9}), State()
    for step in Walk(seed=60, steps=8):
        step.k.mul_(1e3)
        decision = cis.decide(step, state)
        assert isinstance(decision.selection, Selection)
        as_sets(decision.selection, (0, 0, 0), step.columns)
