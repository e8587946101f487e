"""Compiled decode: the same logits and books as eager steps, and a number of graphs that no text, method or cache changes."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import prehoc
from families import VOCABULARY, cache_name, forced, fresh, generated, padded, tokens
from prehoc import packing
from prehoc.integrations.transformers import compiled
from prehoc.integrations.transformers.layers import new_cache
from prehoc.integrations.transformers.support import find_base

SIZES = "sink=2,local=4"
METHODS = ["dense", f"cis:critical=8,{SIZES},block_size=4", "streaming:budget=12,sink=2", f"psaw:{SIZES},phi=0.2"]
PROMPT, END = 37, 85


def small(seed: int = 0, layers: int = 2) -> Any:
    """A Llama of two layers and width 64, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = tf.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=72,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.25,
            pad_token_id=0,
            eos_token_id=None,
        )
        net = tf.LlamaForCausalLM(config).eval().requires_grad_(False)
    net.set_attn_implementation("sdpa")
    return net


def run(net: Any, ids: Tensor, cache: Any, **more: Any) -> Any:
    """One forward on a cache of the caller's."""
    return net(ids, use_cache=True, **{cache_name(net): cache}, **more)


@pytest.fixture(autouse=True)
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Counts graphs, which run in torch as they were traced: what torch's compiler makes of them has a test of its own."""
    torch.compiler.reset()
    counts = CompileCounterWithBackend("eager")
    monkeypatch.setattr(compiled, "_BACKEND", counts)
    yield counts
    torch.compiler.reset()


def both(net: Any, method: str, ids: Tensor, mask: Tensor | None = None) -> None:
    """Eager and compiled loops over the same text agree in every logit and in the books, audits included."""
    found = []
    for options in ({}, {"compile": True}):
        with prehoc.sparsify(net, method, audit=0.3, **options) as session:
            logits = forced(net, ids, PROMPT, mask)
            report = session.report().to_dict()
        del report["seconds_per_step"], report["prefill"]["seconds"]
        found.append((logits, report))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=1e-5)
    assert found[1][1] == found[0][1]


@pytest.mark.parametrize("pad", [(0,), (5, 0)])
def test_all_methods_share_one_graph_and_equal_eager_steps(pad: tuple[int, ...], counter: Any) -> None:
    net = small()
    ids, mask = padded(pad, END)
    for method in METHODS:
        both(net, method, ids, mask)  # the cache outgrows its capacity on the way
    assert counter.frame_count == 1


def test_a_gate_on_hidden_states_has_a_graph_of_its_own(counter: Any) -> None:
    net = small()
    ids, mask = padded((5, 0), END)
    hidden, key = (f"cis_{gate}:critical=8,{SIZES},block_size=4,tau=0.1" for gate in ("hidden", "key"))
    for method, graphs in ((METHODS[1], 1), (hidden, 2), (METHODS[1], 2), (hidden, 2), (key, 2)):
        both(net, method, ids, mask)
        assert counter.frame_count == graphs


def test_every_step_runs_in_the_graph_shared_or_retrieved(monkeypatch: pytest.MonkeyPatch) -> None:
    net, own, layers = small(), compiled.decode_layer, []
    monkeypatch.setattr(
        compiled, "decode_layer", lambda fwd, layer, *rest: layers.append(layer) or own(fwd, layer, *rest)
    )
    with prehoc.sparsify(net, METHODS[1], compile=True) as session:
        forced(net, tokens(1, END), PROMPT)
        assert 0.25 <= session.report().decode.retrieval_ratio < 1
    assert layers == [0, 1] * (END - PROMPT)


@pytest.mark.parametrize("method", [f"cpe:critical=8,{SIZES}", f"h2o:critical=8,{SIZES}", "quest:budget=32"])
def test_freezing_evicting_and_paged_methods(method: str, counter: Any) -> None:
    ids, mask = padded((0, 3), END)
    both(small(layers=4), method, ids, mask)
    assert counter.frame_count == 1


@pytest.mark.parametrize("family", ["gemma3", "mistral-sliding"])
def test_sliding_layers(family: str, counter: Any) -> None:
    ids, mask = padded((0, 3), END)
    both(fresh(family), METHODS[1], ids, mask)
    assert counter.frame_count == 1


def test_generate_twice_makes_one_graph(counter: Any) -> None:
    net, found = small(), []
    for options in ({}, {"compile": True}):
        with prehoc.sparsify(net, METHODS[1], **options):
            ids, mask = padded((4, 0), 40)
            first = generated(net, ids, mask, new=20)
            found.append([*first, *generated(net, tokens(2, 61, seed=3), new=9)])
    for eager, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=1e-5)
    assert counter.frame_count == 1


def test_beams_reorder_a_cache_that_the_graph_does_not_know() -> None:
    net, found = small(), []
    for options in ({}, {"compile": True}):
        with prehoc.sparsify(net, METHODS[1], **options):
            found.append(net.generate(tokens(2, 40), max_new_tokens=12, num_beams=3, do_sample=False))
    assert torch.equal(*found)


def test_a_second_turn_is_an_eager_forward_between_compiled_steps(counter: Any) -> None:
    net, found = small(), []
    for options in ({}, {"compile": True}):
        with prehoc.sparsify(net, METHODS[1], **options) as session, torch.no_grad():
            cache, logits = session.new_cache(), []
            for part in torch.split(tokens(1, 60), [30, 1, 1, 1, 20, 1, 1, 1, 1, 1, 1, 1], dim=1):
                logits.append(run(net, part, cache).logits[:, -1])
        found.append(torch.stack(logits))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)
    assert counter.frame_count == 1


def test_detach_restores_the_model_bit_for_bit() -> None:
    net, ids = small(), tokens(1, 50)
    base, before = net.model, forced(net, ids, PROMPT)
    with prehoc.sparsify(net, METHODS[1], compile=True):
        assert isinstance(base.forward, compiled.CompiledForward)
        forced(net, ids, PROMPT)
    assert "forward" not in base.__dict__
    assert torch.equal(forced(net, ids, PROMPT), before)


def test_attached_again_nothing_is_compiled_again(counter: Any) -> None:
    net, ids = small(), tokens(1, 45)
    for method in METHODS:
        with prehoc.sparsify(net, method, compile=True):
            forced(net, ids, PROMPT)
    assert counter.frame_count == 1


def test_packed_layers_run_in_a_graph_of_their_own(counter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Copies(dict[int, Tensor]):
        def get(self, address: int, default: Any = None) -> Any:
            calls.append(address)
            return self[address]

    net, ids, calls = small(), tokens(1, END), []
    monkeypatch.setattr(packing, "_copies", Copies())
    for _ in range(3):
        with prehoc.packed(net):
            calls.clear()
            both(net, METHODS[1], ids)
            # eager and compiled, prompt and steps: two layers of seven products, and the head
            assert len(calls) == 2 * (2 * 7 + 1) * (END - PROMPT + 1)
        both(net, METHODS[1], ids)
        assert counter.frame_count == 2


def test_batches_of_any_size_take_three_graphs(counter: Any) -> None:
    net, made = small(), []
    with prehoc.sparsify(net, METHODS[1], compile=True):
        for rows in (2, 3, 5, 1, 7):
            forced(net, tokens(rows, PROMPT + 3), PROMPT)
            made.append(counter.frame_count)
    assert made == [1, 2, 2, 3, 3]


def test_a_model_without_its_head_keeps_its_signature() -> None:
    base, ids = small().model, tokens(1, 45)
    with prehoc.sparsify(base, METHODS[1], compile=True), torch.no_grad():
        cache = new_cache(base.config)
        run(base, ids[:, :40], cache)
        out = run(base, ids[:, 40:41], cache)
        assert getattr(out, cache_name(base)) is cache and cache.get_seq_length() == 41


def test_steps_of_two_sessions_interleaved_do_not_mix() -> None:
    nets, ids = [small(1), small(2, layers=3)], tokens(1, 50)
    wanted = []
    for net in nets:
        with prehoc.sparsify(net, METHODS[1]):
            wanted.append(forced(net, ids, PROMPT))
    got: list[list[Tensor]] = [[], []]
    one, two = (prehoc.sparsify(net, METHODS[1], compile=True) for net in nets)
    # a model's graphs count for itself alone, also where torch allows one
    with one as first, two as second, torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        caches = [first.new_cache(), second.new_cache()]
        for part in torch.split(ids, [PROMPT] + [1] * 13, dim=1):
            for logits, net, cache in zip(got, nets, caches, strict=True):
                logits.append(run(net, part, cache).logits[:, -1])
    for ours, eager in zip(got, wanted, strict=True):
        torch.testing.assert_close(torch.stack(ours, 1), eager, rtol=0, atol=1e-5)


def test_threads_do_not_mix() -> None:
    net, texts = small(), [tokens(1, PROMPT + 12, seed=i) for i in range(3)]
    with prehoc.sparsify(net, METHODS[1]):
        wanted = [forced(net, ids, PROMPT) for ids in texts]
    got: dict[int, Tensor] = {}
    with prehoc.sparsify(net, METHODS[1], compile=True):
        forced(net, texts[0][:, : PROMPT + 2], PROMPT)
        work = [threading.Thread(target=lambda i=i: got.update({i: forced(net, texts[i], PROMPT)})) for i in range(3)]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
    for i, logits in enumerate(wanted):
        torch.testing.assert_close(got[i], logits, rtol=0, atol=1e-5)


def test_a_deep_copy_runs_its_own_weights() -> None:
    net, ids = small(), tokens(1, 45)
    with prehoc.sparsify(net, METHODS[1], compile=True):
        twin = copy.deepcopy(net)
        twin.model.norm.weight.mul_(2)
        ours, other = forced(net, ids, PROMPT), forced(twin, ids, PROMPT)
    torch.testing.assert_close(other, 2 * ours)


def test_a_model_is_not_kept_alive() -> None:
    net = small()
    with prehoc.sparsify(net, "dense", compile=True):
        forced(net, tokens(1, 45), PROMPT)
    gone = weakref.ref(net.model)
    del net
    gc.collect()
    assert gone() is None


def test_what_a_graph_was_not_made_for_runs_uncompiled_and_says_so(counter: Any) -> None:
    net, ids = small(), tokens(1, 45)
    with prehoc.sparsify(net, "dense", compile=True) as session, torch.no_grad():
        cache = session.new_cache()
        run(net, ids[:, :40], cache)
        with pytest.warns(RuntimeWarning, match="decode steps with the argument output_hidden_states run uncompiled"):
            out = run(net, ids[:, 40:41], cache, output_hidden_states=True)
        assert len(out.hidden_states) == 3
        mask = torch.zeros(1, 1, 1, 42)
        with pytest.warns(RuntimeWarning, match="decode steps with a mask of the caller's own run uncompiled"):
            run(net, ids[:, 41:42], cache, attention_mask=mask)
        with pytest.warns(RuntimeWarning, match="decode steps with the argument cu_seq_lens_q run uncompiled"):
            run(net, ids[:, 42:43], cache, cu_seq_lens_q=torch.tensor([0, 1]))
    ids, mask = padded((3, 0), 45)
    with prehoc.sparsify(net, "dense", compile=True) as session, torch.no_grad():
        cache = session.new_cache()
        run(net, ids[:, :40], cache, attention_mask=mask[:, :40])
        with pytest.warns(RuntimeWarning, match="decode steps with padding but without position_ids run uncompiled"):
            run(net, ids[:, 40:41], cache, attention_mask=mask[:, :41])
    assert counter.frame_count == 0


def test_what_cannot_be_one_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    net, ids = small(), tokens(1, 45)
    own = net.model.layers[1].mlp.forward

    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return own(x)

    monkeypatch.setattr(net.model.layers[1].mlp, "forward", broken)
    with (
        prehoc.sparsify(net, "dense", compile=True),
        pytest.raises(ValueError, match="LlamaModel could not be compiled in one graph: .*; leave compile=True out"),
    ):
        forced(net, ids, PROMPT)


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    net = small()
    monkeypatch.setattr(compiled, "_BACKEND", "inductor")
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(ValueError, match=r"no C\+\+ compiler was found \(\w+\); install g\+\+ .*leave compile=True out"),
    ):
        prehoc.attach(net, "dense", compile=True)
    monkeypatch.setattr(compiled.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match="the headers of this Python are missing; install them"):
        prehoc.attach(net, "dense", compile=True)
    assert not hasattr(net, "_prehoc_session") and "forward" not in net.model.__dict__


def test_foreign_forwards_and_other_values_are_refused() -> None:
    net = small()
    with pytest.raises(ValueError, match="compile='yes' must be true or false"):
        prehoc.attach(net, "dense", compile="yes")  # type: ignore[arg-type]
    net.model.layers[0]._hf_hook = None
    with pytest.raises(ValueError, match="LlamaModel runs under another library's forward hooks"):
        prehoc.attach(net, "dense", compile=True)


def test_a_base_without_positions_is_refused() -> None:
    class Odd(tf.LlamaModel):
        def forward(self, input_ids: Tensor, cache: Any = None, **kwargs: Any) -> Any:
            return super().forward(input_ids, cache=cache, **kwargs)

    net = small()
    base = Odd(net.config).eval()
    assert find_base(base) is not None
    with pytest.raises(ValueError, match="Odd takes no position_ids"):
        prehoc.attach(base, "dense", compile=True)


def test_torchs_own_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_BACKEND", "inductor")
    net = small()
    ids, mask = padded((4, 0), END)
    for method in METHODS[:2]:
        found = []
        for options in ({}, {"compile": True}):
            with prehoc.sparsify(net, method, **options):
                found.append(forced(net, ids, PROMPT, mask))
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-4)
