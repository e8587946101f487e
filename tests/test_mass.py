"""`prehoc.mass` against slow numpy references, and the propositions of docs/theory.md as properties."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prehoc import mass

Array = npt.NDArray[np.float64]
SLACK = 1e-9  # float64 rounding; every inequality below is otherwise taken literally


@dataclasses.dataclass
class Case:
    """Random float64 queries, keys, values and a padded selection of odd sizes, flat to spiky."""

    q: Array  # [B, H, D]
    k: Array  # [B, Hkv, L, D]
    v: Array  # [B, Hkv, L, D]
    visible: npt.NDArray[np.bool_]  # [B, L]
    indices: npt.NDArray[np.int32]  # [B, Hs, Kmax]
    scale: float

    @property
    def groups(self) -> int:
        """Query heads per KV head."""
        return int(self.q.shape[1] // self.k.shape[1])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw sizes with hypothesis (they shrink), numbers from a seeded generator (they need not)."""
    batch, kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    length, dim = draw(st.integers(1, 33)), draw(st.integers(1, 9))
    per_query_head = draw(st.booleans())
    sharpness = draw(st.sampled_from([0.0, 0.3, 1.0, 5.0, 30.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    q = rng.normal(size=(batch, kv_heads * groups, dim)) * sharpness
    k = rng.normal(size=(batch, kv_heads, length, dim)) + rng.normal(size=(batch, kv_heads, 1, dim)) * 3
    v = rng.normal(size=(batch, kv_heads, length, dim)) + 2.0
    visible = rng.random((batch, length)) < 0.8
    visible[:, -1] = True
    rows = kv_heads * groups if per_query_head else kv_heads
    width = draw(st.integers(1, length + 2))
    indices = np.full((batch, rows, width), -1, dtype=np.int32)
    for b in range(batch):
        for h in range(rows):
            take = rng.integers(1, min(width, length) + 1)
            # The last key is always read, as the query's own key is: a selection always holds some mass.
            keys = set(rng.choice(length, take, replace=False)[:-1].tolist()) | {length - 1}
            indices[b, h, : len(keys)] = sorted(keys)
    return Case(q, k, v, visible, indices, draw(st.sampled_from([dim**-0.5, 0.07, 1.3])))


def t(x: npt.NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


def slow_softmax(logits: Array) -> Array:
    e = np.exp(logits - logits.max())
    return np.asarray(e / e.sum())


def slow_weights(c: Case) -> Array:
    out = np.zeros((c.q.shape[0], c.q.shape[1], c.k.shape[2]))
    for b in range(out.shape[0]):
        seen = np.flatnonzero(c.visible[b])
        for h in range(out.shape[1]):
            out[b, h, seen] = slow_softmax(c.k[b, h // c.groups, seen] @ c.q[b, h] * c.scale)
    return out


def slow_truncated(c: Case, full: Array) -> Array:
    out = np.zeros_like(full)
    share = full.shape[1] // c.indices.shape[1]
    for b in range(full.shape[0]):
        for h in range(full.shape[1]):
            keys = [i for i in c.indices[b, h // share].tolist() if i >= 0]
            out[b, h, keys] = full[b, h, keys] / full[b, h, keys].sum()
    return out


def slow_entropy(p: Array) -> float:
    return -sum(float(x) * math.log(x) for x in p.ravel() if x > 0)


def slow_information(rows: Array) -> float:
    return slow_entropy(rows.mean(0)) - float(np.mean([slow_entropy(r) for r in rows]))


def slow_bound(x: float, n: int, steps: int) -> float:
    """Compute the formula of design decision 6 as it stands there."""
    ceiling = min(math.log(steps), math.log(n))
    if x > 1 - 1 / n:
        return ceiling
    h = sum(-y * math.log(y) for y in (x, 1 - x) if y > 0)
    return min(2 * ((x * math.log(n - 1) if n > 1 else 0.0) + h), ceiling)


# ---- weights and mass ----------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(cases())
def test_weights_and_masses_equal_slow_references(c: Case) -> None:
    full = slow_weights(c)
    weights = mass.attention_weights(t(c.q), t(c.k), c.scale, t(c.visible))
    np.testing.assert_allclose(weights.numpy(), full, atol=1e-12)
    share = full.shape[1] // c.indices.shape[1]
    kept = np.array(
        [
            [sum(full[b, h, i] for i in c.indices[b, h // share] if i >= 0) for h in range(full.shape[1])]
            for b in range(full.shape[0])
        ]
    )
    np.testing.assert_allclose(mass.retained_mass(weights, t(c.indices)).numpy(), kept, atol=1e-12)
    np.testing.assert_allclose(mass.dropped_mass(weights, t(c.indices)).numpy(), 1 - kept, atol=1e-12)
    truncated = mass.truncated_weights(weights, t(c.indices)).numpy()
    usable = (kept > 1e-200)[..., None]  # below, the row's only keys underflowed: no distribution to compare
    reference = slow_truncated(c, np.where(usable, full, 1.0))
    np.testing.assert_allclose(np.where(usable, truncated, 0), np.where(usable, reference, 0), atol=1e-9)


@settings(deadline=None)
@given(cases(), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_low_precision_inputs_are_upcast(c: Case, dtype: torch.dtype) -> None:
    """The only error is the inputs' own rounding: on the rounded numbers float32 agrees to 1e-5 (logits reach ~1e3)."""
    q, k = t(np.clip(c.q, -20, 20)).to(dtype), t(c.k).to(dtype)
    rounded = dataclasses.replace(c, q=q.double().numpy(), k=k.double().numpy())
    weights = mass.attention_weights(q, k, c.scale, t(c.visible))
    assert weights.dtype == torch.float32
    largest = float(np.abs(rounded.q).sum(-1).max() * np.abs(rounded.k).max()) * c.scale
    tolerance = 1e-6 + 4 * largest * 2.0**-23  # a logit is off by its float32 rounding; softmax has constant 1
    np.testing.assert_allclose(weights.numpy(), slow_weights(rounded), atol=tolerance)
    for function in (mass.retained_mass, mass.dropped_mass, mass.truncated_weights):
        assert function(weights.to(dtype), t(c.indices)).dtype == torch.float32


def test_row_without_visible_key_is_zero_and_leaves_others_alone() -> None:
    q, k = torch.randn(2, 4, 8), torch.randn(2, 2, 5, 8)
    visible = torch.tensor([[False] * 5, [True] * 5])
    weights = mass.attention_weights(q, k, 0.3, visible)
    assert (weights[0] == 0).all()
    assert torch.equal(weights[1:], mass.attention_weights(q[1:], k[1:], 0.3))


def test_dropped_mass_keeps_digits_a_subtraction_would_lose() -> None:
    weights = torch.tensor([[[1.0 - 3e-9, 1e-9, 2e-9]]])
    assert mass.dropped_mass(weights, torch.tensor([[[0, -1]]])).item() == pytest.approx(3e-9, rel=1e-5)


def test_repeated_and_unordered_indices_count_once() -> None:
    weights = torch.tensor([[[0.1, 0.2, 0.3, 0.4]]])
    indices = torch.tensor([[[3, -1, 1, 3]]], dtype=torch.int32)
    assert mass.retained_mass(weights, indices).item() == pytest.approx(0.6)
    assert mass.total_variation(weights, indices).item() == pytest.approx(0.4)


# ---- propositions 1 and 2: total variation, output -----------------------------------------------------------------


@settings(deadline=None)
@given(cases())
def test_total_variation_is_exactly_the_dropped_mass(c: Case) -> None:
    full = slow_weights(c)
    distance = 0.5 * np.abs(full - slow_truncated(c, full + 1e-300)).sum(-1)  # the tiny term only avoids 0/0
    np.testing.assert_allclose(mass.total_variation(t(full), t(c.indices)).numpy(), distance, atol=1e-9)


@settings(deadline=None)
@given(cases(), st.sampled_from(["mean", "zero", "random"]))
def test_output_moves_at_most_by_its_bound(c: Case, centre: str) -> None:
    full = slow_weights(c)
    truncated = slow_truncated(c, full + 1e-300)
    rng = np.random.default_rng(0)
    at = {"mean": None, "zero": torch.zeros(()), "random": t(rng.normal(size=(c.k.shape[1], c.k.shape[3])))}[centre]
    radius = mass.vector_radius(t(c.v), at, t(c.visible))
    bound = mass.output_error_bound(mass.dropped_mass(t(full), t(c.indices)), radius).numpy()
    for b in range(full.shape[0]):
        for h in range(full.shape[1]):
            moved = np.linalg.norm((full[b, h] - truncated[b, h]) @ c.v[b, h // c.groups])
            assert moved <= bound[b, h] + 1e-8


def test_output_bound_is_attained() -> None:
    """Two keys, opposite values, all mass but delta on one: no smaller constant than 2 would do."""
    values = torch.tensor([[[[1.0], [-1.0]]]], dtype=torch.float64)
    weights = torch.tensor([[[0.75, 0.25]]], dtype=torch.float64)
    indices = torch.tensor([[[0]]])
    radius = mass.vector_radius(values)
    moved = (weights - mass.truncated_weights(weights, indices)) @ values[0]
    assert moved.norm() == mass.output_error_bound(mass.dropped_mass(weights, indices), radius).item() == 0.5


@settings(deadline=None)
@given(cases())
def test_vector_radius_equals_slow_reference(c: Case) -> None:
    radius = mass.vector_radius(t(c.v), visible=t(c.visible)).numpy()
    norm = mass.vector_radius(t(c.v), torch.zeros(()), t(c.visible)).numpy()
    for b in range(c.v.shape[0]):
        for h in range(c.v.shape[1]):
            seen = c.v[b, h, c.visible[b]]
            assert radius[b, h] == pytest.approx(max(np.linalg.norm(x - seen.mean(0)) for x in seen), abs=1e-12)
            assert norm[b, h] == pytest.approx(max(np.linalg.norm(x) for x in seen), abs=1e-12)


# ---- propositions 3 and 4: information -----------------------------------------------------------------------------


@st.composite
def truncated_rows(draw: st.DrawFn) -> tuple[Array, Array]:
    """Rows of a growing context (padded with zeros), full and truncated to a random non-empty set of carried keys."""
    steps, start = draw(st.integers(1, 12)), draw(st.integers(1, 30))
    sharpness = draw(st.sampled_from([0.0, 1.0, 4.0, 12.0]))
    drop = draw(st.sampled_from([0.0, 0.02, 0.2, 0.6, 0.98]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = start + steps - 1
    full, kept = np.zeros((steps, n)), np.zeros((steps, n))
    for row in range(steps):
        seen = start + row
        full[row, :seen] = slow_softmax(rng.normal(size=seen) * sharpness)
        keep = rng.random(n) >= drop
        keep[rng.integers(seen)] = True
        kept[row] = full[row] * keep / (full[row] * keep).sum()
    return full, kept


@settings(deadline=None)
@given(truncated_rows())
def test_information_changes_at_most_by_its_bounds(rows: tuple[Array, Array]) -> None:
    full, kept = rows
    steps, n = full.shape
    delta = float(0.5 * np.abs(full - kept).sum(-1).mean())
    change = abs(slow_information(full) - slow_information(kept))
    assert float(mass.routing_information(t(full))) == pytest.approx(max(slow_information(full), 0), abs=1e-9)
    assert change <= float(mass.information_bound(delta, n, steps)) + SLACK
    assert change <= float(mass.information_bound_steps(delta, n, steps)) + SLACK


@settings(deadline=None)
@given(st.floats(0, 1), st.integers(1, 5000), st.integers(1, 500))
def test_information_bounds_equal_their_formulas(x: float, n: int, steps: int) -> None:
    bound, by_steps = float(mass.information_bound(x, n, steps)), float(mass.information_bound_steps(x, n, steps))
    assert bound == pytest.approx(slow_bound(x, n, steps), abs=1e-9)
    h = sum(-y * math.log(y) for y in (x, 1 - x) if y > 0)
    assert by_steps == pytest.approx(min(x * math.log(steps) + h, math.log(steps), math.log(n)), abs=1e-9)
    assert 0.0 <= bound <= min(math.log(n), math.log(steps))


def test_entropy_continuity_is_attained() -> None:
    """One certain key against the mass spread evenly over the others: the step of proposition 3 cannot be smaller."""
    n, x = 7, 0.3
    certain, spread = np.eye(n)[0], np.r_[1 - x, np.full(n - 1, x / (n - 1))]
    half_of_bound = float(mass.information_bound(x, n, 10**6)) / 2  # two such steps; many steps: the clip is far
    assert slow_entropy(spread) - slow_entropy(certain) == pytest.approx(x * math.log(n - 1) + slow_binary(x))
    assert half_of_bound <= slow_entropy(spread) - slow_entropy(certain) + SLACK


def slow_binary(x: float) -> float:
    return -x * math.log(x) - (1 - x) * math.log(1 - x)


@pytest.mark.parametrize("x", [0.5, 0.75, 1.0])
def test_bound_does_not_fall_again_above_one_minus_one_over_n(x: float) -> None:
    """With two keys h(x) returns to 0 at x = 1, where the information may still change by all of log 2."""
    assert float(mass.information_bound(x, 2, 9)) == pytest.approx(math.log(2))


@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_information_bound_keeps_the_shape(shape: tuple[int, ...]) -> None:
    bound = mass.information_bound(torch.full(shape, 0.01), 50, 20)
    assert bound.shape == shape
    assert bound.dtype == torch.float64


@pytest.mark.parametrize(("n", "steps"), [(1, 9), (9, 1), (1, 1)])
def test_one_key_or_one_step_carries_no_information(n: int, steps: int) -> None:
    for x in (0.0, 0.5, 1.0):
        assert float(mass.information_bound(x, n, steps)) == 0.0
        assert float(mass.information_bound_steps(x, n, steps)) == 0.0
    assert float(mass.routing_information(torch.full((steps, n), 1.0 / n))) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("x", [0.0, 1e-300, 1e-9, 0.5, 1 - 1e-9, 1.0])
def test_binary_entropy_is_finite_and_right_at_the_ends(x: float) -> None:
    expected = slow_binary(x) if 1e-200 < x < 1 else x * 690.8 if x < 0.5 else 0.0
    assert float(mass.binary_entropy(x)) == pytest.approx(expected, rel=1e-6, abs=1e-290)


# ---- proposition 5: two queries on the same keys -------------------------------------------------------------------


@settings(deadline=None)
@given(cases(), st.sampled_from([1e-3, 0.1, 1.0, 10.0]), st.booleans())
def test_attention_change_is_below_both_bounds(c: Case, step: float, centred: bool) -> None:
    rng = np.random.default_rng(1)
    moved = dataclasses.replace(c, q=c.q + rng.normal(size=c.q.shape) * step)
    change = np.abs(slow_weights(c) - slow_weights(moved)).sum(-1)
    radius = mass.vector_radius(t(c.k), None if centred else torch.zeros(()), t(c.visible))
    linear = mass.lipschitz_bound(t(c.q), t(moved.q), radius, c.scale).numpy()
    sharper = mass.attention_change_bound(t(c.q), t(moved.q), radius, c.scale).numpy()
    distance = np.linalg.norm(c.q - moved.q, axis=-1) * c.scale
    np.testing.assert_allclose(linear, distance * np.repeat(radius.numpy(), c.groups, axis=-1), rtol=1e-12)
    assert (change <= sharper + SLACK).all()
    assert (sharper <= np.minimum(linear, 2.0) + SLACK).all()


def test_change_bound_is_attained_so_the_constant_is_one() -> None:
    """Two opposite keys and a query crossing between them meet 2 tanh(L/2); for small steps that is L itself."""
    k = torch.tensor([[[[1.0], [-1.0]]]], dtype=torch.float64)
    for step in (1e-4, 0.5, 3.0):
        q1, q2 = torch.tensor([[[-step / 2]]]).double(), torch.tensor([[[step / 2]]]).double()
        change = (mass.attention_weights(q2, k, 1.0) - mass.attention_weights(q1, k, 1.0)).abs().sum()
        bound = mass.attention_change_bound(q1, q2, mass.vector_radius(k), 1.0)
        assert change.item() == pytest.approx(bound.item(), rel=1e-9)
    assert mass.lipschitz_bound(q1, q2, mass.vector_radius(k), 1.0).item() == pytest.approx(3.0)


def printed_form(q1: Array, q2: Array, k: Array) -> float:
    """(2 K_max / sqrt d) sqrt(2 - 2 cos): the form in public notes on the paper, without the norm of q."""
    cosine = float(q1 @ q2 / np.linalg.norm(q1) / np.linalg.norm(q2))
    return float(2 * np.linalg.norm(k, axis=-1).max() / math.sqrt(len(q1)) * math.sqrt(2 - 2 * cosine))


def test_printed_form_without_the_query_norm_fails() -> None:
    """The counterexample of docs/theory.md: two keys, two queries, cosine .98, exceeded 4.3 times."""
    k, q1, q2 = np.array([[1.0, 0.0], [-1.0, 0.0]]), np.array([1.0, 10.0]), np.array([-1.0, 10.0])
    change = float(np.abs(slow_softmax(k @ q1 / math.sqrt(2)) - slow_softmax(k @ q2 / math.sqrt(2))).sum())
    assert change == pytest.approx(2 * math.tanh(1 / math.sqrt(2)), rel=1e-12)
    assert change / printed_form(q1, q2, k) == pytest.approx(4.33, abs=0.01)
    a, b = t(q1[None, None]), t(q2[None, None])
    ours = mass.lipschitz_bound(a, b, mass.vector_radius(t(k[None, None]), torch.zeros(())), 2**-0.5)
    assert change <= ours.item()


def test_printed_form_fails_on_random_data_too() -> None:
    """No crafted keys: Gaussian keys and queries of norm 100 (common in trained models), cosine close to 1."""
    rng, ratios = np.random.default_rng(0), []
    for _ in range(200):
        k, q1 = rng.normal(size=(8, 4)), rng.normal(size=4)
        q1 *= 100 / np.linalg.norm(q1)
        q2 = q1 + rng.normal(size=4) * 2
        change = float(np.abs(slow_softmax(k @ q1 / 2) - slow_softmax(k @ q2 / 2)).sum())
        ratios.append(change / printed_form(q1, q2, k))
    assert max(ratios) == pytest.approx(25.9, abs=0.1)  # both numbers stand in docs/theory.md
    assert sum(ratio > 1 for ratio in ratios) == 26


# ---- proposition 6: a shared set -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Block:
    """An anchor at `anchor` keys and a later query at `now` >= anchor keys of one KV head with G query heads."""

    q0: Array  # [G, D]
    q1: Array  # [G, D]
    k: Array  # [now, D]
    anchor: int
    sink: int
    local: int
    critical: int
    radius: int

    @property
    def middle(self) -> range:
        """The anchor's middle."""
        return range(self.sink, self.anchor - self.local)


@st.composite
def blocks(draw: st.DrawFn, max_groups: int = 3) -> Block:
    dim, groups = draw(st.integers(1, 6)), draw(st.integers(1, max_groups))
    sink, local, critical = draw(st.integers(0, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 6))
    anchor = sink + local + draw(st.integers(0, 25))
    now = anchor + draw(st.integers(0, 7))
    sharpness, step = draw(st.sampled_from([0.5, 2.0, 10.0])), draw(st.sampled_from([0.0, 0.03, 0.3, 3.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    k = rng.normal(size=(now, dim)) + rng.normal(size=dim) * 2
    q0 = rng.normal(size=(groups, dim)) * sharpness
    return Block(q0, q0 + rng.normal(size=q0.shape) * step, k, anchor, sink, local, critical, draw(st.integers(0, 2)))


def best(scores: Array, keys: range, k: int) -> set[int]:
    """Exact top-k of `keys`, lower index first among equals."""
    return set(sorted(keys, key=lambda i: (-scores[i], i))[:k])


def dilated(b: Block, chosen: set[int]) -> set[int]:
    return {j for i in chosen for j in range(i - b.radius, i + b.radius + 1) if j in b.middle}


def loss_and_bounds(b: Block, chosen: set[int], head: int, oracle: set[int]) -> tuple[float, list[float]]:
    """Oracle's retained mass minus the shared set's, and the bounds on it from weakest knowledge to strongest."""
    now = len(b.k)
    today = slow_softmax(b.k @ b.q1[head])
    sinks = set(range(b.sink))
    ours = sinks | dilated(b, chosen) | set(range(b.anchor - b.local, now))  # frozen window
    theirs = sinks | oracle | set(range(now - b.local, now))  # sliding window
    lost = float(today[sorted(theirs)].sum() - today[sorted(ours)].sum())
    if not b.middle:
        return lost, [0.0]
    keys = list(b.middle)
    before, after = slow_softmax(b.k[keys] @ b.q0[head]), slow_softmax(b.k[keys] @ b.q1[head])
    k = len(chosen)
    gap = float(np.sort(before)[::-1][:k].sum() - sum(before[i - b.sink] for i in chosen))
    q0, q1 = t(b.q0[None, [head]]), t(b.q1[None, [head]])
    everything, middle = t(b.k[None, None]), t(b.k[None, None, keys])
    bounds = [
        mass.lipschitz_bound(q0, q1, mass.vector_radius(everything, torch.zeros(())), 1.0),
        mass.lipschitz_bound(q0, q1, mass.vector_radius(middle), 1.0),
        mass.attention_change_bound(q0, q1, mass.vector_radius(middle), 1.0),
        torch.tensor(np.abs(before - after).sum()),
    ]
    middle_mass = float(today[keys].sum())
    plain = [float(mass.shared_loss_bound(x, anchor_gap=gap)) for x in bounds]
    return lost, plain + [float(mass.shared_loss_bound(x, middle_mass, gap)) for x in bounds]


@settings(max_examples=200, deadline=None)
@given(blocks(max_groups=1))
def test_shared_set_loses_at_most_its_bound(b: Block) -> None:
    chosen = best(b.k @ b.q0[0], b.middle, b.critical)
    today = range(b.sink, len(b.k) - b.local)
    lost, bounds = loss_and_bounds(b, chosen, 0, best(b.k @ b.q1[0], today, b.critical))
    assert all(lost <= bound + SLACK for bound in bounds)
    if b.middle:  # the remark after proposition 6: tanh(L) in place of the L1 change
        keys = t(b.k[None, None, list(b.middle)])
        distance = mass.lipschitz_bound(t(b.q0[None]), t(b.q1[None]), mass.vector_radius(keys), 1.0)
        assert lost <= slow_softmax(b.k @ b.q1[0])[list(b.middle)].sum() * math.tanh(float(distance)) + SLACK
    if np.array_equal(b.q0, b.q1):
        assert lost <= SLACK  # the same query loses nothing, however many keys were appended


@settings(max_examples=200, deadline=None)
@given(blocks())
def test_shared_set_of_a_kv_head_loses_at_most_its_bound(b: Block) -> None:
    """The set is the KV head's compromise (max over heads of logit - LSE), the oracle the best by mean weight."""
    logits = b.q0 @ b.k[: b.anchor].T
    scores = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).max(0)
    chosen = best(scores, b.middle, b.critical)
    mean = np.mean([slow_softmax(b.k @ q) for q in b.q1], axis=0)
    oracle = best(mean, range(b.sink, len(b.k) - b.local), b.critical)
    for head in range(len(b.q0)):
        lost, bounds = loss_and_bounds(b, chosen, head, oracle)
        assert all(lost <= bound + SLACK for bound in bounds)


def test_tanh_form_of_the_shared_loss_is_attained() -> None:
    """The anchor scores two keys alike and keeps one, the next query wants the other: loss tanh(x), L = x."""
    k, q0, q1 = torch.tensor([[[[1.0], [-1.0]]]]).double(), torch.zeros(1, 1, 1).double(), -torch.ones(1, 1, 1).double()
    after = mass.attention_weights(q1, k, 1.0)[0, 0]
    lost = after.max() - after[0]
    distance = mass.lipschitz_bound(q0, q1, mass.vector_radius(k), 1.0)
    change = mass.attention_change_bound(q0, q1, mass.vector_radius(k), 1.0)
    assert lost.item() == pytest.approx(math.tanh(distance.item()), rel=1e-12)
    assert lost.item() < mass.shared_loss_bound(change).item() < distance.item()


def test_compromise_of_a_kv_head_is_lost_even_when_the_query_stands_still() -> None:
    """Two query heads want different keys, one is read: the other loses its anchor gap, with no change at all."""
    k = torch.tensor([[[[1.0], [-1.0]]]]).double()
    weights = mass.attention_weights(torch.tensor([[[2.0], [-1.0]]]).double(), k, 1.0)
    shared = torch.tensor([[[0]]])  # the first head is the surer one
    lost = weights.amax(-1) - mass.retained_mass(weights, shared)
    gap = lost  # here the middle is everything and today is the anchor
    bound = mass.shared_loss_bound(torch.zeros(1, 2), anchor_gap=gap)
    assert lost[0, 0] == 0.0
    assert lost[0, 1] > 0.5
    assert (lost <= bound).all()


# ---- audit interval ------------------------------------------------------------------------------------------------


def test_interval_of_none_one_and_equal_samples() -> None:
    assert all(math.isnan(x) for x in mass.mean_interval([]))
    mean, low, high = mass.mean_interval([0.25])
    assert mean == 0.25
    assert math.isnan(low)
    assert math.isnan(high)
    assert mass.mean_interval([0.5] * 9) == (0.5, 0.5, 0.5)


def test_interval_is_seeded_ordered_and_close_to_theory() -> None:
    x = np.random.default_rng(3).beta(2, 5, size=(40, 10))
    mean, low, high = mass.mean_interval(x, seed=1)
    assert (mean, low, high) == mass.mean_interval(x.ravel().tolist(), seed=1)
    assert mass.mean_interval(x, seed=2)[1:] != (low, high)
    assert mean == pytest.approx(x.mean())
    half = 1.96 * x.std() / math.sqrt(x.size)
    assert low == pytest.approx(mean - half, abs=0.15 * half)
    assert high == pytest.approx(mean + half, abs=0.15 * half)
    _, low99, high99 = mass.mean_interval(x, confidence=0.99, seed=1)
    assert low99 < low < high < high99


def test_interval_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for run in range(300):
        _, low, high = mass.mean_interval(rng.random(60), seed=run, resamples=400)
        hits += low <= 0.5 <= high
    assert 0.90 <= hits / 300 <= 0.98


def test_interval_does_not_depend_on_how_memory_was_split(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(5).random(50)
    whole = mass.mean_interval(x)
    monkeypatch.setattr(mass, "_BOOTSTRAP_CHUNK", 170)
    assert mass.mean_interval(x) == whole


# ---- errors --------------------------------------------------------------------------------------------------------

W = torch.full((1, 4, 6), 1 / 6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mass.attention_weights(torch.ones(1, 4, 8), torch.ones(1, 2, 6, 7), 1.0), r"\[1, 2, 6, 7\].*pass q"),
        (lambda: mass.attention_weights(torch.ones(1, 4, 8), torch.ones(1, 3, 6, 8), 1.0), "4 query heads.*3 KV heads"),
        (
            lambda: mass.attention_weights(torch.ones(1, 4, 8), torch.ones(1, 2, 6, 8), 1.0, torch.ones(1, 6)),
            "torch.float32.*pass bool",
        ),
        (lambda: mass.retained_mass(W[0], torch.zeros(1, 4, 1).int()), r"\[4, 6\].*pass weights"),
        (lambda: mass.retained_mass(W, torch.zeros(1, 3, 1).int()), "3 index rows; pass Hs = H"),
        (lambda: mass.retained_mass(W, torch.zeros(1, 4, 1)), "indices are torch.float32; pass int32"),
        (lambda: mass.retained_mass(W, torch.full((1, 4, 1), 6)), r"index 6 is outside \[-1, 6\)"),
        (lambda: mass.dropped_mass(W, torch.full((1, 4, 1), -2)), r"index -2 is outside \[-1, 6\)"),
        (lambda: mass.vector_radius(torch.ones(1, 6, 8)), r"vectors \[1, 6, 8\], visible None: pass vectors"),
        (lambda: mass.vector_radius(torch.ones(1, 2, 6, 8), None, torch.ones(1, 5) > 0), r"visible \[1, 5\]: pass"),
        (lambda: mass.lipschitz_bound(torch.ones(1, 4, 8), torch.ones(1, 2, 8), torch.ones(1, 2), 1.0), "differ; pass"),
        (lambda: mass.output_error_bound(torch.ones(1, 4), torch.ones(1, 3)), "4 query heads.*pass one number"),
        (lambda: mass.routing_information(torch.ones(2, 3)), "2 away from summing to one; pass"),
        (lambda: mass.information_bound(1.5, 4, 4), r"1.5 is outside \[0, 1\]; pass"),
        (lambda: mass.information_bound(math.nan, 4, 4), "nan is outside"),
        (lambda: mass.information_bound(0.5, 0, 4), "n=0, steps=4.*at least 1"),
        (lambda: mass.information_bound_steps(0.5, 4, 0), "n=4, steps=0.*at least 1"),
        (lambda: mass.mean_interval([0.1, math.nan]), "1 of 2 samples are not finite; drop"),
        (lambda: mass.mean_interval([0.1], confidence=95), "confidence=95 is not between 0 and 1; pass e.g. 0.95"),
        (lambda: mass.mean_interval([0.1], resamples=0), "resamples=0 must be at least 1; pass"),
    ],
)
def test_bad_input_names_the_value_and_the_fix(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()
