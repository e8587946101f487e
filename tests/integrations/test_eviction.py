"""Evicting methods on a model: the cache shrinks, recording changes nothing, and what cannot follow is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import families
from families import cache_name, forced, generated, padded, sparsify, tokens
from prehoc.integrations.transformers.layers import fork
from prehoc.replay import replay
from prehoc.trace import trace

EVICTING = ["h2o:sink=2,local=6,critical=10", "snapkv:local=6,critical=12,kernel=3"]


class Nothing:
    """A recorder that looks away: with one, the cache stays whole and the keys are selected."""

    def record(self, *args: Any) -> None:
        """Look away."""


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("method", EVICTING)
def test_evicted_and_recorded_runs_are_one(method: str, family: str) -> None:
    net = families.model(family, torch.float64)
    ids, mask = padded((0, 7, 30), 52, seed=1)
    ids, mask = torch.cat([ids, tokens(3, 9, seed=2)], 1), torch.cat([mask, torch.ones(3, 9, dtype=mask.dtype)], 1)
    with sparsify(net, method) as session:
        evicted = forced(net, ids, 52, mask)
        small = session.report()
        session.recorder = Nothing()  # type: ignore[assignment]
        session.reset()
        recorded = forced(net, ids, 52, mask)
        whole = session.report()
    torch.testing.assert_close(evicted, recorded, atol=1e-8, rtol=1e-8)
    for name in ("keys_read", "keys_visible", "counted_triples", "covered_triples", "retrievals"):
        assert getattr(small.decode, name) == getattr(whole.decode, name), name
    assert small.decode.keys_read < small.decode.keys_visible


@pytest.mark.parametrize("method", EVICTING)
def test_the_cache_holds_the_budget(method: str) -> None:
    net, held = families.model("llama"), {}
    for name in ("dense", method):
        with sparsify(net, name) as session:
            cache = session.new_cache()
            generated(net, tokens(2, 300, seed=3), new=12, **{cache_name(net): cache})
            held[name] = session.report().cache_bytes
            assert cache.get_seq_length() == 311
            columns = {layer.keys.shape[2] for layer in cache.layers}
    assert columns == ({17} if method.startswith("h2o") else {18 + 11})
    assert held[method] < held["dense"] / 2


def test_dense_goes_on_with_an_evicted_cache_and_others_are_refused() -> None:
    net = families.model("llama", torch.float64)
    ids, more = tokens(1, 52, seed=4), tokens(1, 5, seed=5)
    with sparsify(net, EVICTING[0]) as session:
        cache = session.new_cache()
        forced(net, ids, 45, cache=cache)
    twin = fork(cache)
    layer = cache.layers[0].store
    assert layer.first == (0,) and twin.layers[0].store.first == (0,)
    assert torch.equal(layer.columns(), twin.layers[0].store.columns())
    with sparsify(net, "dense") as session:
        out = net(more[:, :1], use_cache=True, **{cache_name(net): cache})
        report = session.report()
    assert bool(out.logits.isfinite().all())
    assert report.decode.keys_read == 4 * 2 * 18 and report.decode.keys_visible == 4 * 2 * 53
    with sparsify(net, "cis:budget=48"), pytest.raises(ValueError, match="evicted by another method"):
        net(more[:, :1], use_cache=True, **{cache_name(net): twin})
    with pytest.raises(ValueError, match="evicted keys cannot be taken back"):
        twin.crop(-3)
    with pytest.raises(ValueError, match="evicted keys cannot be taken back"):
        cache.layers[0].crop(50)  # of the text's 53 columns, as older releases say it
    cache.layers[0].crop(53)
    assert layer.notes and cache.get_seq_length() == 53


@pytest.mark.parametrize("method", EVICTING)
def test_a_prompt_read_without_the_method_is_refused_until_a_prompt_follows(method: str) -> None:
    net = families.model("llama", torch.float64)
    with sparsify(net, "dense") as session:
        cache = session.new_cache()
        net(tokens(1, 52, seed=6), use_cache=True, **{cache_name(net): cache})
    name = method.partition(":")[0]
    with sparsify(net, method):
        with pytest.raises(ValueError, match=f"method '{name}' chooses by the prompt's queries, which it has not seen"):
            net(tokens(1, 1, seed=7), use_cache=True, **{cache_name(net): fork(cache)})
        net(tokens(1, 9, seed=7), use_cache=True, **{cache_name(net): cache})  # a question: its queries choose
        out = net(tokens(1, 1, seed=8), use_cache=True, **{cache_name(net): cache})
        assert bool(out.logits.isfinite().all())
        assert cache.layers[0].store.length == (17 if name == "h2o" else 19)


@pytest.mark.parametrize("method", EVICTING)
def test_traces_are_whole_and_replays_are_refused(method: str) -> None:
    net = families.model("llama")
    found = trace(net, tokens(60, seed=9), 52, 8, method, observe=True, record=("qk",))
    assert int(found.keys[0].min()) == (18 if method.startswith("h2o") else 19)
    assert float(found.retained.min()) > 0 and float(found.retained.max()) < 1
    assert float((found.oracle_equal_keys - found.retained).min()) > -1e-5
    from prehoc.methods import parse_method

    with pytest.raises(ValueError, match="use prehoc trace instead of a replay"):
        replay(found, {"one": parse_method(method)})
