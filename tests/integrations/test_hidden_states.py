"""The gate of CIS on hidden states: what it is given is what enters the layer, and nobody else pays for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import families
from families import FAMILIES, cache_name, padded, sparsify, tokens
from prehoc.selection import Decision, Step

PROMPT, END = 50, 58
METHOD = "cis_hidden:sink=2,local=6,critical=10,block_size=4,tau=0.1"


class Seen:
    """Keeps the hidden state of the last step of each layer."""

    def __init__(self) -> None:
        self.hidden: dict[int, Tensor | None] = {}

    def record(self, step: Step, v: Tensor, decision: Decision) -> None:
        """Take in one layer."""
        self.hidden[step.layer] = step.hidden


def decoded(net: Any, method: str, **options: Any) -> list[tuple[dict[int, Tensor | None], tuple[Tensor, ...]]]:
    """What the gate saw at each step of a padded batch, and what the model itself returns as its hidden states."""
    ids, mask = padded((0, 19), END)
    positions, seen, out = (mask.cumsum(-1) - 1).clamp(min=0), Seen(), []
    with sparsify(net, method, **options) as session, torch.no_grad():
        session.recorder, cache = seen, session.new_cache()
        for begin, end in zip((0, *range(PROMPT, END)), range(PROMPT, END + 1), strict=False):
            found = net(
                ids[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, begin:end],
                use_cache=True,
                output_hidden_states=True,
                **{cache_name(net): cache},
            )
            assert bool(seen.hidden) == (begin > 0)
            if begin:
                out.append((dict(seen.hidden), found.hidden_states))
    return out


@pytest.mark.parametrize("observe", [False, True])
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"mistral-sliding"}))  # it has no layer that selects
def test_the_gate_sees_what_enters_the_layer(family: str, observe: bool) -> None:
    net = families.model(family, torch.float64)
    ids, mask = padded((0, 19), END)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    stock = net(ids, attention_mask=mask, position_ids=positions, output_hidden_states=True).hidden_states
    apart = 0.0
    for number, (hidden, found) in enumerate(decoded(net, METHOD, observe=observe)):
        assert set(hidden) == ({1, 3} if family == "gemma3" else {0, 1, 2, 3})
        for layer, got in hidden.items():
            assert got is not None and torch.equal(got, found[layer][:, 0])
            apart = max(apart, (got - stock[layer][:, PROMPT + number]).abs().max().item())
    assert (apart < 1e-5) == observe, (
        "a pruned run sees its own hidden states, an observed one those of the stock model"
    )


@pytest.mark.parametrize(
    ("method", "hooks"),
    [("cis", 0), ("cis_key", 0), ("cis_hidden", 1), ("cpe:gate=hidden", 1), ("cpe:gate=hidden,parts=psaw+etf", 0)],
)
def test_only_a_method_that_asks_has_hooks(method: str, hooks: int) -> None:
    net = families.model("llama")
    for _ in range(2):
        with sparsify(net, method):
            assert {len(layer._forward_pre_hooks) for layer in net.model.layers} == {hooks}
        assert not any(layer._forward_pre_hooks for layer in net.model.layers)


def test_others_are_handed_nothing() -> None:
    assert all(hidden[0] is None for hidden, _ in decoded(families.model("llama"), METHOD.replace("hidden", "key")))


def test_an_anchor_keeps_no_graph_alive() -> None:
    net = families.fresh("llama").requires_grad_(True)
    with sparsify(net, METHOD) as session:
        cache = session.new_cache()
        for part in tokens(1, 52).split([50, 1, 1], dim=1):
            net(part, use_cache=True, **{cache_name(net): cache})
    assert not any(layer.store.state["anchor"].requires_grad for layer in cache.layers)
