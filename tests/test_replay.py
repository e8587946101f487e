"""A replay of recorded queries and keys decides exactly what an observed decode decides."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from prehoc.methods import parse_method
from prehoc.replay import replay
from prehoc.trace import Trace, trace

PROMPT, STEPS = 100, 20
METHODS = [
    "dense",
    "cis:critical=24,tau=0.3",
    "cis:critical=24,tau=0.3,refresh=block,local_window=sliding,granularity=query_head",
    "cis:critical=30,mass=0.8,sink=2,local=8",
    "cpe:critical=24,tau=0.3,phi=0.3,psaw_start_layer=1",
    "oracle:critical=24",
    "streaming:budget=40",
    "psaw:phi=0.3,start_layer=1",
    "cis-star:budget=64",
    "cis_key:critical=24,tau=0.2",
]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(0, 64, (PROMPT + STEPS,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def recorded(model: Any, tokens: list[int]) -> Trace:
    return trace(model, tokens, PROMPT, STEPS, "dense", observe=True, record=("qk",))


def test_a_replay_equals_the_observed_decode(model: Any, tokens: list[int], recorded: Trace) -> None:
    methods = {text: parse_method(text) for text in METHODS}
    replayed = replay(recorded, methods, record=("selections",))
    for text, found in replayed.items():
        expected = trace(model, tokens, PROMPT, STEPS, text, observe=True, record=("selections",))
        for field in dataclasses.fields(Trace):
            if field.name not in ("meta", "q", "k"):
                np.testing.assert_array_equal(getattr(found, field.name), getattr(expected, field.name), err_msg=text)
        for key in ("method", "keys", "oracle", "granularity"):
            assert found.meta[key] == expected.meta[key]
        ours, theirs = (dict(x.meta["totals"]["decode"]) for x in (found, expected))
        assert ours.pop("steps") == 0, "no forward was run"
        theirs.pop("steps")
        assert ours == theirs


def test_chosen_layers_are_those_of_the_whole(recorded: Trace) -> None:
    method = {"a": parse_method(METHODS[1])}
    whole, part = replay(recorded, method)["a"], replay(recorded, method, layers=[2])["a"]
    np.testing.assert_array_equal(part.retained[:, 2], whole.retained[:, 2])
    assert np.isnan(part.retained[:, :2]).all() and part.summary()["triples"] == STEPS * 2
    assert part.meta["replayed_layers"] == [2]


def test_what_cannot_be_replayed_is_refused(model: Any, tokens: list[int], recorded: Trace) -> None:
    method = {"a": parse_method("dense")}
    with pytest.raises(ValueError, match="no queries and keys; record it with --observe --record qk"):
        replay(trace(model, tokens, PROMPT, STEPS, "dense", observe=True), method)
    with pytest.raises(ValueError, match="was decoded sparsely"):
        replay(trace(model, tokens, PROMPT, STEPS, "cis:critical=24", record=("qk",)), method)
    with pytest.raises(ValueError, match="layer 3 was not recorded; choose among 0, 1, 2"):
        replay(recorded, method, layers=[0, 3])
    with pytest.raises(ValueError, match="gate=hidden compares the hidden states.*run the whole model"):
        replay(recorded, {"a": parse_method("cis_hidden:critical=24")})
