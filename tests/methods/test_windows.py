"""The controls of PSAW hide as many keys in all as PSAW does, spread in their own way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import families
from families import forced, sparsify, tokens
from prehoc.methods import PSAW, LinearWindow, StaticWindow, parse_method

KEYS: list[dict[str, Any]] = [
    {},
    {"phi": 0.5, "alpha": 1.0, "start_layer": 3},
    {"phi": 0.9, "alpha": 2.5, "start_layer": 0},
    {"phi": 1.0, "start_layer": 2},
]


def hidden(method: PSAW, layers: int, t: int) -> list[int]:
    """Keys that each layer hides from a query that sees t."""
    windows = [method.masked(layer, layers) for layer in range(layers)]
    return [0 if window is None else window(t) for window in windows]


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("layers", [12, 30])
@pytest.mark.parametrize("t", [5000, 131072])
def test_as_many_keys_as_psaw_in_all(keys: dict[str, Any], layers: int, t: int) -> None:
    psaw, static, linear = (hidden(kind(**keys), layers, t) for kind in (PSAW, StaticWindow, LinearWindow))
    for control in (static, linear):
        assert abs(sum(control) - sum(psaw)) <= layers  # each layer is rounded down
        assert [x > 0 for x in control] == [x > 0 for x in psaw]
    assert len({x for x in static if x}) <= 1
    steps = {b - a for a, b in zip(linear, linear[1:], strict=False) if a}
    assert not steps or max(steps) - min(steps) <= 1
    if sum(psaw):
        assert static != psaw and linear != psaw


@pytest.mark.parametrize("name", ["static_window", "linear_window"])
def test_operations_of_a_prompt_and_keys_of_decode_are_psaws(name: str) -> None:
    net, ids = families.model("llama"), tokens(1, 220, seed=1)
    found = {}
    for method in ("psaw", name):
        with sparsify(net, f"{method}:phi=0.5,alpha=1,start_layer=1,sink=2,local=6") as session:
            forced(net, ids, 200)
            report = session.report()
        found[method] = report.prefill.pairs, report.decode.keys_read, report.prefill.pairs_dense
    assert found["psaw"][2] == found[name][2] > found["psaw"][0]
    for one, two in zip(found["psaw"][:2], found[name][:2], strict=True):
        assert one == pytest.approx(two, rel=0.02)


def test_local_keys_and_sinks_stay_visible() -> None:
    for kind in (StaticWindow, LinearWindow):
        window = kind(phi=0.3, alpha=1.0, start_layer=0, local=32).masked(3, 4)
        assert window is not None
        assert all(window(t) <= max(t - 32, 0) for t in range(1, 100)) and window(1000) > 400


@pytest.mark.parametrize("name", ["static_window", "linear_window"])
def test_the_last_layers_only(name: str) -> None:
    """A start at or behind the last layer hides nothing."""
    for start in (3, 4):
        method = parse_method(f"{name}:start_layer={start}")
        assert isinstance(method, PSAW) and hidden(method, 4, 1000) == [0] * 4


def test_errors_name_the_value_and_the_fix() -> None:
    with pytest.raises(
        ValueError, match=r"phi=0.01, alpha=1.0 hide .* 'linear_window' cannot spread them over 4 layers"
    ):
        LinearWindow(phi=0.01, alpha=1.0, start_layer=0).masked(1, 4)
    with pytest.raises(ValueError, match="phi=0 must lie in"):
        StaticWindow(phi=0)
    with pytest.raises(ValueError, match="start_layer=9 is beyond the model's 4 layers"):
        LinearWindow(start_layer=9).masked(0, 4)
    assert torch.tensor(hidden(StaticWindow(phi=0.01, alpha=1.0, start_layer=0), 4, 1000)).max() < 1000
