"""One cache under several methods and loops: no list outlives the tokens or the method that it was made for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import prehoc
from families import fresh
from prehoc.integrations.transformers.compat import cache_key

TINY = "sink=2,local=4"


def _net() -> Any:
    return fresh("llama")


def _step(net: Any, ids: Tensor, cache: Any) -> Tensor:
    return net(input_ids=ids, use_cache=True, **{cache_key({}, net): cache}).logits[:, -1]


def _ids(length: int) -> Tensor:
    return torch.randint(3, 60, (1, length), generator=torch.Generator().manual_seed(5))


class Columns:
    """Keeps the columns that each step of layer 0 read."""

    def __init__(self) -> None:
        self.seen: list[set[int]] = []

    def record(self, step: Any, v: Tensor, decision: Any) -> None:
        """Take in one step."""
        if step.layer == 0:
            self.seen.append(set(decision.selection.indices[0, 0].tolist()) - {-1})


@pytest.mark.parametrize("window", ["frozen", "sliding"])
def test_a_list_does_not_survive_steps_of_another_method(window: str) -> None:
    net, ids = _net(), _ids(60)
    method = f"cis:critical=8,{TINY},tau=-1,block_size=64,local_window={window}"
    with torch.no_grad():
        with prehoc.sparsify(net, method) as session:
            cache = session.new_cache(64)
            _step(net, ids[:, :40], cache)
            _step(net, ids[:, 40:41], cache)
        with prehoc.sparsify(net, "dense"):
            for i in range(41, 44):
                _step(net, ids[:, i : i + 1], cache)
        with prehoc.sparsify(net, method) as session:
            session.recorder = columns = Columns()
            _step(net, ids[:, 44:45], cache)
            _step(net, ids[:, 45:46], cache)
    assert {41, 42, 43, 44} <= columns.seen[0]
    assert {42, 43, 44, 45} <= columns.seen[1]


def test_another_granularity_starts_anew() -> None:
    net, ids = _net(), _ids(60)
    with torch.no_grad():
        with prehoc.sparsify(net, f"cis:critical=8,{TINY}") as session:
            cache = session.new_cache(64)
            _step(net, ids[:, :40], cache)
            _step(net, ids[:, 40:41], cache)
        with prehoc.sparsify(net, f"cis:critical=8,{TINY},granularity=query_head") as session:
            assert bool(_step(net, ids[:, 41:42], cache).isfinite().all())
            assert session.report().decode.retrieval_ratio == 1.0


@pytest.mark.parametrize("order", [("cpu", "reference", "cpu"), ("reference", "cpu", "reference")])
def test_another_backend_starts_anew(order: tuple[str, ...]) -> None:
    """As on one backend whose lists are thrown away at each change."""
    net, ids, method = _net(), _ids(60), f"cis:critical=8,{TINY},tau=-1,block_size=64"
    logits: dict[bool, list[Tensor]] = {True: [], False: []}
    for changes, found in logits.items():
        cache, at = None, 40
        for name in order:
            with torch.no_grad(), prehoc.sparsify(net, method, backend=name if changes else "reference") as session:
                if cache is None:
                    cache = session.new_cache(64)
                    _step(net, ids[:, :at], cache)
                elif not changes:
                    for layer in cache.layers:
                        layer.store.state.clear()
                for _ in range(4):
                    found.append(_step(net, ids[:, at : at + 1], cache))
                    at += 1
                report = session.report().decode
                assert report.retrieval_ratio == 1 / 4
    torch.testing.assert_close(torch.stack(logits[True]), torch.stack(logits[False]), atol=1e-4, rtol=1e-4)


def test_attached_again_the_same_method_goes_on_sharing() -> None:
    net, ids = _net(), _ids(60)
    method = f"cis:critical=8,{TINY},tau=-1,block_size=64"
    with torch.no_grad():
        with prehoc.sparsify(net, method) as session:
            cache = session.new_cache(64)
            _step(net, ids[:, :40], cache)
            _step(net, ids[:, 40:41], cache)
        with prehoc.sparsify(net, method) as session:
            _step(net, ids[:, 41:42], cache)
            assert session.report().decode.retrievals == 0


def test_inference_mode_may_end_in_the_middle() -> None:
    net, ids = _net(), _ids(60)
    with prehoc.sparsify(net, f"cis:critical=8,{TINY}") as session:
        cache = session.new_cache(64)
        with torch.inference_mode():
            _step(net, ids[:, :40], cache)
            _step(net, ids[:, 40:41], cache)
        with torch.no_grad():
            for i in range(41, 52):
                assert bool(_step(net, ids[:, i : i + 1], cache).isfinite().all())


def test_a_ratio_is_of_the_whole_prompt_read_in_chunks() -> None:
    net, ids = _net(), _ids(61)
    with torch.no_grad(), prehoc.sparsify(net, f"cis:ratio=0.5,{TINY}", audit=0) as session:
        cache = session.new_cache(64)
        _step(net, ids[:, :20], cache)
        _step(net, ids[:, 20:60], cache)
        _step(net, ids[:, 60:61], cache)
        assert "of 60 prompt tokens" in session.report().budget
        assert session.report().budget.startswith("30 keys")


def test_a_model_and_its_base_are_one() -> None:
    net = _net()
    before = net.config._attn_implementation
    with prehoc.sparsify(net, "dense"), pytest.raises(ValueError, match="attached already"):
        prehoc.attach(net.model, "dense")
    session = prehoc.attach(net.model, "dense")
    with pytest.raises(ValueError, match="attached already"):
        prehoc.attach(net, "dense")
    session.detach()
    assert net.config._attn_implementation == before


def test_a_mask_of_the_callers_own_is_in_the_books() -> None:
    net, ids = _net(), _ids(12)
    with torch.no_grad(), prehoc.sparsify(net, "dense") as session:
        cache = session.new_cache(16)
        _step(net, ids[:, :8], cache)
        mask = torch.zeros(1, 1, 1, 9)
        net(input_ids=ids[:, 8:9], attention_mask=mask, use_cache=True, **{cache_key({}, net): cache})
        assert "decode           1 steps" in str(session.report())
        assert session.report().decode.dense_triples == session.report().decode.triples > 0


def test_changing_the_attention_while_attached_is_refused() -> None:
    net, ids = _net(), _ids(12)
    session = prehoc.attach(net, "dense")
    net.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="changed to 'eager' while prehoc is attached; call prehoc.detach"):
        net(input_ids=ids)
    assert str(session.report()).startswith("method")
    prehoc.detach(net)
    assert net.config._attn_implementation != "prehoc"


def test_a_deep_copy_is_detached_through_the_model() -> None:
    net = _net()
    with prehoc.sparsify(net, "dense"):
        twin = copy.deepcopy(net)
    prehoc.detach(twin)
    with prehoc.sparsify(twin, "dense") as session:
        twin(input_ids=_ids(4))
    assert session.model is twin


def test_few_audits_print_no_interval() -> None:
    net, ids = _net(), _ids(50)
    with torch.no_grad(), prehoc.sparsify(net, f"cis:critical=8,{TINY}", audit=1.0) as session:
        cache = session.new_cache(64)
        _step(net, ids[:, :48], cache)
        _step(net, ids[:, 48:49], cache)
    report = session.report()
    assert 0 < report.audited < 10
    assert f"audited, n = {report.audited}: too few for an interval" in str(report) and "[" not in str(report)
