"""The schedules of PSAW and ETF against the paper's formulas, in exact fractions where they are exact."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prehoc.methods import CPE, ETF, PSAW

layers = st.integers(1, 64)
shares = st.floats(1e-12, 1.0, exclude_min=True)
powers = st.floats(0.0, 8.0)
lengths = st.integers(1, 200_000)
quick = settings(max_examples=200, deadline=None)


def formula(layer: int, total: int, start: int, base: float, power: float, t: int) -> int:
    """floor((1 - base^(power (l - l_s) / (N - l_s))) t) for l >= l_s, else 0, as the paper has it."""
    if layer < start or total == start:
        return 0
    return math.floor((1.0 - base ** (power * (layer - start) / (total - start))) * t)


def hidden(psaw: PSAW, layer: int, total: int, t: int) -> int:
    function = psaw.masked(layer, total)
    return 0 if function is None else function(t)


def test_the_formulas_by_hand() -> None:
    """phi = 1/2, alpha = 1, l_s = 2 of N = 4: the third layer hides 1 - 2^-1/2 = 29.3 %, layer 2 nothing."""
    psaw = PSAW(phi=0.5, alpha=1.0, start_layer=2, local=1)
    assert [hidden(psaw, layer, 4, 1000) for layer in range(4)] == [0, 0, 0, 292]
    etf = ETF(psi=0.5, gamma=1.0, start_layer=2)
    assert [etf.frozen(layer, 4, 1000) for layer in range(4)] == [0, 0, 0, 292]
    assert [PSAW(phi=0.25, alpha=1.0, start_layer=0, local=1).masked(layer, 2) is None for layer in (0, 1)] == [
        True,
        False,
    ]
    assert hidden(PSAW(phi=0.25, alpha=1.0, start_layer=0, local=1), 1, 2, 1000) == 500
    assert ETF(psi=0.25, gamma=2.0, start_layer=0).frozen(1, 2, 1000) == 750


@quick
@given(layers, st.data(), shares, powers, lengths, st.integers(1, 64))
def test_psaw_equals_the_formula(total: int, data: st.DataObject, phi: float, alpha: float, t: int, local: int) -> None:
    start, layer = data.draw(st.integers(0, total)), data.draw(st.integers(0, total - 1))
    psaw = PSAW(phi=phi, alpha=alpha, start_layer=start, local=local)
    got = hidden(psaw, layer, total, t)
    assert got == max(0, min(formula(layer, total, start, phi, alpha, t), t - local))
    assert 0 <= got <= max(0, t - local)  # the last `local` keys are never hidden
    if layer <= start:
        assert psaw.masked(layer, total) is None  # l_s itself is unaffected


@quick
@given(layers, st.data(), shares, powers, lengths)
def test_etf_equals_the_formula(total: int, data: st.DataObject, psi: float, gamma: float, t: int) -> None:
    start, layer = data.draw(st.integers(0, total)), data.draw(st.integers(0, total - 1))
    got = ETF(psi=psi, gamma=gamma, start_layer=start).frozen(layer, total, t)
    assert got == max(0, min(formula(layer, total, start, psi, gamma, t), t - 1))
    assert 0 <= got <= t - 1  # the newest token is always live
    if layer <= start:
        assert got == 0


@quick
@given(layers, st.floats(0, 1), shares, powers, lengths)
def test_depth_and_length_only_ever_add(total: int, start: float, base: float, power: float, t: int) -> None:
    psaw, etf = PSAW(phi=base, alpha=power, start_layer=start, local=4), ETF(psi=base, gamma=power, start_layer=start)
    for rows in (
        [hidden(psaw, layer, total, t) for layer in range(total)],
        [etf.frozen(layer, total, t) for layer in range(total)],
    ):
        assert rows == sorted(rows)  # a deeper layer hides no less: a frozen row never comes back to life
    for layer in {0, total // 2, total - 1}:
        seen = [hidden(psaw, layer, total, s) for s in range(max(1, t - 40), t + 1)]
        assert seen == sorted(seen)  # a later query hides no less: a key that left the window stays out
        assert all(b - a <= 1 for a, b in zip(seen, seen[1:], strict=False))
        frozen = [etf.frozen(layer, total, s) for s in range(max(1, t - 40), t + 1)]
        assert frozen == sorted(frozen)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 7.0])
def test_one_is_dense(power: float) -> None:
    for total in (1, 3, 32):
        for start in (0, 0.5, 1):
            if isinstance(start, int) and start > total:
                continue
            assert all(
                PSAW(phi=1.0, alpha=power, start_layer=start).masked(layer, total) is None for layer in range(total)
            )
            etf = ETF(psi=1.0, gamma=power, start_layer=start)
            assert all(etf.frozen(layer, total, 10**6) == 0 for layer in range(total))


def test_power_zero_is_dense() -> None:
    assert all(PSAW(phi=0.1, alpha=0.0, start_layer=0).masked(layer, 8) is None for layer in range(8))
    assert all(ETF(psi=0.1, gamma=0.0, start_layer=0).frozen(layer, 8, 1000) == 0 for layer in range(8))


@pytest.mark.parametrize("tiny", [1e-300, 1e-30, 1e-17])
def test_tiny_shares_are_clamped(tiny: float) -> None:
    """1 - tiny rounds to 1 in float64: the newest token and the local keys stay."""
    psaw, etf = PSAW(phi=tiny, alpha=8.0, start_layer=0, local=5), ETF(psi=tiny, gamma=8.0, start_layer=0)
    for t in (1, 2, 4, 5, 6, 7, 1000):
        assert hidden(psaw, 7, 8, t) == max(0, t - 5)
        assert etf.frozen(7, 8, t) == t - 1


def test_start_layer_as_fraction_and_number() -> None:
    """A float is a fraction of the depth, rounded down; an int is a layer."""
    for total in (1, 4, 5, 30):
        for fraction in (0.0, 0.25, 0.5, 0.75, 0.99):
            number = int(Fraction(fraction) * total)
            for layer in range(total):
                by_fraction, by_number = (PSAW(start_layer=s, phi=0.3, local=1) for s in (fraction, number))
                assert hidden(by_fraction, layer, total, 999) == hidden(by_number, layer, total, 999)
                assert ETF(start_layer=fraction).frozen(layer, total, 99) == ETF(start_layer=number).frozen(
                    layer, total, 99
                )
    assert all(PSAW(start_layer=1.0, phi=0.1).masked(layer, 6) is None for layer in range(6))
    assert PSAW(start_layer=1, phi=0.1).masked(2, 6) is not None  # the layer 1, not the whole depth


def test_start_layer_beyond_the_model() -> None:
    assert PSAW(start_layer=6).masked(5, 6) is None
    for method in (lambda: PSAW(start_layer=7).masked(0, 6), lambda: ETF(start_layer=7).frozen(0, 6, 10)):
        with pytest.raises(ValueError, match="start_layer=7 is beyond the model's 6 layers; give 0 to 5"):
            method()


def test_cpe_hands_its_keys_on() -> None:
    cpe = CPE(phi=0.3, alpha=2.0, psi=0.6, gamma=3.0, start_layer=0.5, sink=3, local=7, kv="share")
    plan = cpe.plan()
    assert plan.window == PSAW(phi=0.3, alpha=2.0, start_layer=0.5, sink=3, local=7)
    assert plan.freeze == ETF(psi=0.6, gamma=3.0, start_layer=0.5, kv="share")
    own = CPE(start_layer=0.5, psaw_start_layer=2, etf_start_layer=3).plan()
    assert own.window is not None and own.freeze is not None
    assert own.window.start_layer == 2 and own.freeze.start_layer == 3
    default = CPE().plan()
    assert default.window is not None and default.freeze is not None
    assert default.window.start_layer == 0.83 and default.freeze.start_layer == ETF.start_layer


@pytest.mark.parametrize(
    ("parts", "present"),
    [
        (("cis",), (True, False, False)),
        (("psaw",), (False, True, False)),
        (("etf",), (False, False, True)),
        (("psaw", "etf"), (False, True, True)),
        (("cis", "psaw", "etf"), (True, True, True)),
    ],
)
def test_cpe_is_any_combination(parts: tuple[str, ...], present: tuple[bool, ...]) -> None:
    plan = CPE(parts=parts).plan()
    assert (plan.selector is not None, plan.window is not None, plan.freeze is not None) == present
