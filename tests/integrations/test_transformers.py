"""The transformers engine: refusals, caches, threads, copies, books, and PSAW and ETF against a forward written out here."""

from __future__ import annotations

import copy
import math
import threading
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers import DynamicCache

import families
import prehoc
from families import cache_name, forced, generated, padded, sparsify, tokens
from prehoc import CIS, CPE, ETF, PSAW
from prehoc.selection import Decision, Selection, Step, Window

SMALL: dict[str, Any] = {"sink": 2, "local": 6, "critical": 10, "block_size": 4}
DEPTH: dict[str, Any] = {"phi": 0.4, "alpha": 1.0, "psi": 0.4, "gamma": 1.0, "start_layer": 1}


@pytest.fixture
def net() -> Any:
    return families.model("llama")


@pytest.fixture
def exact() -> Any:
    return families.model("llama", torch.float64)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("cis", {"prompt_lookup_num_tokens": 3}, "assisted decoding verifies several tokens.*use method dense"),
        ("psaw", {"prompt_lookup_num_tokens": 3}, "assisted decoding"),
        ("cis", {"cache_implementation": "static"}, "cache_implementation='static' is not supported"),
        ("dense", {"cache_implementation": "quantized"}, "cache_implementation='quantized' is not supported"),
        ("cis", {"output_attentions": True}, "output_attentions=True is not available"),
        ("dense", {"output_attentions": True}, "output_attentions=True is not available"),
        ("cis", {"use_cache": False}, "use_cache=False recomputes the whole text.*set it to True"),
        (
            "cis",
            {"max_new_tokens": 500},
            r"40 prompt tokens \+ 500 new ones exceed the model's 512 positions.*at most 472",
        ),
    ],
)
def test_generate_refuses_by_name(net: Any, method: str, options: dict[str, Any], message: str) -> None:
    with sparsify(net, method) as session, pytest.raises(ValueError, match=message):
        net.generate(tokens(1, 40), **{"max_new_tokens": 4, **options})
    assert session.report().decode.steps == 0 and session.books.prefill.forwards == 0


def test_options_in_the_generation_config_are_refused_too(net: Any) -> None:
    for options, message in (
        ({"prompt_lookup_num_tokens": 3}, "assisted decoding"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"use_cache": False}, "use_cache=False"),
    ):
        config = tf.GenerationConfig(max_new_tokens=4, **options)
        with sparsify(net, "cis"), pytest.raises(ValueError, match=message):
            net.generate(tokens(1, 40), generation_config=config)


def test_an_assistant_model_is_refused(net: Any) -> None:
    with sparsify(net, "cis"), pytest.raises(ValueError, match="assisted decoding"):
        net.generate(tokens(1, 40), assistant_model=families.fresh("llama"), max_new_tokens=4)


def test_assisted_decoding_is_exact_when_dense(exact: Any) -> None:
    ids = tokens(1, 6, seed=3).repeat(1, 6)
    wanted = exact.generate(ids, max_new_tokens=12, do_sample=False)
    with sparsify(exact, "dense"):
        got = exact.generate(ids, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=4)
    assert torch.equal(got, wanted)


def test_empty_prompts_are_refused(net: Any) -> None:
    with sparsify(net, "cis"):
        for call in (lambda: net.generate(), lambda: net.generate(torch.zeros(1, 0, dtype=torch.long))):
            with pytest.raises(ValueError, match="the prompt is empty: give at least one token"):
                call()
        with pytest.raises(ValueError, match="give input_ids or inputs_embeds"):
            net.model()


def test_a_row_without_a_real_token_is_refused(net: Any) -> None:
    ids, mask = padded((0, 20), 20)
    with sparsify(net, "cis"), pytest.raises(ValueError, match=r"empty|no real token|row 1"):
        net.generate(ids, attention_mask=mask, max_new_tokens=3)


@pytest.mark.parametrize("method", ["dense", "cis", "psaw", "etf"])
@pytest.mark.parametrize("hole", [slice(15, 20), slice(7, 9)], ids=["right", "inside"])
def test_padding_elsewhere_is_refused(net: Any, method: str, hole: slice) -> None:
    ids, mask = padded((0, 3), 20)
    mask[1, hole] = 0
    with sparsify(net, method):
        with pytest.raises(ValueError, match="left padding only: set tokenizer.padding_side = 'left'"):
            net.generate(ids, attention_mask=mask, max_new_tokens=3)
        with pytest.raises(ValueError, match="left padding only"):
            net(ids, attention_mask=mask)


def test_training_is_refused(net: Any) -> None:
    with sparsify(net, "cis"):
        net.train()
        try:
            with pytest.raises(ValueError, match="inference only: call model.eval()"):
                net(tokens(1, 5))
        finally:
            net.eval()


def test_attaching_twice_is_refused(net: Any) -> None:
    with sparsify(net, "cis"), pytest.raises(ValueError, match="attached already.*prehoc.detach"):
        prehoc.attach(net, "dense")
    session = prehoc.attach(net, "dense")
    session.detach()
    session.detach()  # once more does nothing
    prehoc.detach(prehoc.attach(net, "cis"))
    assert net.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("csi", {}, "unknown method 'csi'; did you mean 'cis'"),
        (3, {}, "method=3 is not a prehoc method"),
        ("cis", {"audit": 1.5}, "audit=1.5 must lie in"),
        ("cis", {"backend": "refrence"}, "unknown backend 'refrence'; did you mean 'reference'"),
        ("psaw:start_layer=9", {}, "start_layer=9 is beyond the model's 4 layers"),
        ("etf:start_layer=9", {}, "start_layer=9 is beyond the model's 4 layers"),
        ("cis:budget=40", {}, "budget=40 is too small"),
    ],
)
def test_attach_refuses_by_name(net: Any, method: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prehoc.attach(net, method, **options)
    assert net.config._attn_implementation == "sdpa" and "generate" not in net.__dict__


def _gemma2() -> Any:
    sizes = {**families._SIZES, "num_attention_heads": 4}
    return tf.Gemma2ForCausalLM(tf.Gemma2Config(**sizes, head_dim=16))


def _gpt_oss() -> Any:
    sizes = {**families._SIZES, "num_local_experts": 2, "num_experts_per_tok": 1}
    return tf.GptOssForCausalLM(tf.GptOssConfig(**sizes, head_dim=16))


def _t5() -> Any:
    return tf.T5ForConditionalGeneration(
        tf.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )


def _mamba() -> Any:
    return tf.MambaForCausalLM(tf.MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, state_size=4))


def _bert() -> Any:
    return tf.BertForMaskedLM(
        tf.BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    )


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (_gemma2, "Gemma2ForCausalLM soft-caps its attention logits"),
        (_gpt_oss, "GptOssForCausalLM has learned attention sinks"),
        (_t5, "T5ForConditionalGeneration is an encoder-decoder"),
        (_mamba, "MambaForCausalLM has no decoder layers"),
        (_bert, "BertForMaskedLM has no decoder layers"),
        (lambda: nn.Linear(2, 2), "Linear is not a transformers model"),
    ],
)
def test_unsupported_models_are_refused_with_the_reason(build: Any, reason: str) -> None:
    model = build()
    support = prehoc.supports(model)
    assert not support and reason in support.reason
    with pytest.raises(ValueError, match=f"unsupported model: {reason}"):
        prehoc.attach(model, "cis")


def test_supported_models_say_what_they_have() -> None:
    for family in families.FAMILIES:
        support = prehoc.supports(families.model(family))
        assert support and "4 layers" in support.reason, support
    assert "2 with full attention" in prehoc.supports(families.model("gemma3")).reason
    assert "0 with full attention" in prehoc.supports(families.model("mistral-sliding")).reason


@pytest.mark.parametrize("family", sorted(families.SLIDING))
def test_sharing_keys_between_sliding_layers_is_refused(family: str) -> None:
    with pytest.raises(ValueError, match='kv="share" needs equal layers; use kv="project"'):
        prehoc.attach(families.model(family), "etf:kv=share")


def test_a_base_model_without_generate_works(net: Any) -> None:
    base = net.model
    ids = tokens(1, 40)
    with torch.no_grad():
        wanted = base(ids).last_hidden_state
        with sparsify(base, "dense"):
            got = base(ids).last_hidden_state
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


def test_masks_of_the_callers_own(net: Any) -> None:
    """Dense honours a 4-D mask; pruning refuses it."""
    ids = tokens(1, 12)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    mask[5:, 2] = False
    with torch.no_grad():
        wanted = net(ids, attention_mask=mask[None, None], use_cache=False).logits
        with sparsify(net, "dense"):
            got = net(ids, attention_mask=mask[None, None], use_cache=False).logits
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)
        with (
            sparsify(net, "psaw"),
            pytest.raises(ValueError, match="4-D, packed or bidirectional attention mask"),
        ):
            net(ids, attention_mask=mask[None, None], use_cache=False)


def test_auto_falls_back_where_no_native_kernel_runs(exact: Any) -> None:
    ids = tokens(1, 52)
    with sparsify(exact, CIS(**SMALL), backend="reference"):
        wanted = generated(exact, ids)[1]
    with prehoc.sparsify(exact, CIS(**SMALL), backend="auto") as session:
        assert session.backend == "reference"
        assert torch.equal(generated(exact, ids)[1], wanted)
    with pytest.raises(ValueError, match="backend 'cpu' cannot run with torch.float64; use auto or reference"):
        prehoc.attach(exact, "cis", backend="cpu")


# --------------------------------------------------------------------------------------------------------------- caches


@pytest.mark.parametrize("with_config", [True, False])
def test_a_users_empty_cache_is_adopted_in_place(exact: Any, with_config: bool) -> None:
    ids = tokens(1, 52)
    cache = DynamicCache(config=exact.config) if with_config else DynamicCache()
    with sparsify(exact, CIS(**SMALL)):
        wanted = generated(exact, ids)
        got = generated(exact, ids, **{cache_name(exact): cache})
        assert torch.equal(got[1], wanted[1])
        assert cache.get_seq_length() == 61
        out = exact(ids[:, :3], use_cache=True, **{cache_name(exact): cache})
        assert getattr(out, cache_name(exact)) is cache


def test_a_cache_filled_by_stock_is_read(exact: Any) -> None:
    """Prefill by the stock model, decode by prehoc: covered it is stock's, pruned it is our own after a dense prefill."""
    ids, mask = padded((0, 13), 52)
    stock, name = DynamicCache(config=exact.config), cache_name(exact)
    sequences, wanted = generated(exact, ids, mask, **{name: stock})
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    def filled() -> DynamicCache:
        cache = DynamicCache(config=exact.config)
        with torch.no_grad():
            exact(ids, attention_mask=mask, position_ids=positions, use_cache=True, **{name: cache})
        return cache

    def loop(cache: Any) -> Tensor:
        logits, longer = [], mask
        for at in range(52, 60):
            longer = torch.cat([longer, torch.ones(2, 1, dtype=mask.dtype)], 1)
            with torch.no_grad():
                out = exact(
                    sequences[:, at : at + 1],
                    attention_mask=longer,
                    position_ids=longer.sum(1, keepdim=True) - 1,
                    use_cache=True,
                    **{name: cache},
                )
            logits.append(out.logits[:, -1])
        return torch.stack(logits, 1)

    cache = filled()
    with sparsify(exact, CIS(**{**SMALL, "critical": 400})):
        torch.testing.assert_close(loop(cache).float(), wanted[:, 1:9], atol=1e-5, rtol=0)
    cache = filled()
    with sparsify(exact, CIS(**SMALL)):
        got = loop(cache)
        longer = torch.cat([mask, torch.ones(2, 8, dtype=mask.dtype)], 1)
        own = forced(exact, sequences[:, :60], 52, longer)
    torch.testing.assert_close(got, own[:, 1:], atol=1e-9, rtol=0)
    assert (got.float() - wanted[:, 1:9]).abs().max() > 0.01


def test_other_caches_are_refused(net: Any) -> None:
    static = tf.StaticCache(config=net.config, max_cache_len=64)
    with sparsify(net, "cis"):
        with pytest.raises(ValueError, match="StaticCache is not supported.*pass a plain DynamicCache"):
            net(tokens(1, 5), use_cache=True, **{cache_name(net): static})
        with pytest.raises(ValueError, match="StaticCache is not supported"):
            net.generate(tokens(1, 5), max_new_tokens=2, **{cache_name(net): static})


def test_a_decode_step_copies_no_cache(net: Any) -> None:
    with sparsify(net, "cis:budget=48") as session:
        cache = session.new_cache(128)
        out = net(tokens(1, 60), use_cache=True, **{cache_name(net): cache})
        where = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
        for i in range(68):
            out = net(tokens(1, 1, seed=i), use_cache=True, **{cache_name(net): cache})
        assert [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers] == where
        assert bool(out.logits.isfinite().all()) and session.report().cache_bytes > 0


def test_generate_reserves_what_it_needs(net: Any) -> None:
    with sparsify(net, "cis:budget=48") as session:
        net.generate(tokens(2, 60), max_new_tokens=30)
        assert session._cache.layers[0].store.views()[0].stride(1) == 90 * 16


def test_crop_drops_tokens_and_selection_state(exact: Any) -> None:
    """After a crop the next step retrieves anew: as a fresh cache that was decoded to there without state."""
    ids, name = tokens(1, 60), cache_name(exact)
    with sparsify(exact, CIS(**SMALL)) as session, torch.no_grad():
        caches = []
        for end in (60, 57):
            cache = session.new_cache()
            exact(ids[:, :50], use_cache=True, **{name: cache})
            for i in range(50, end):
                exact(ids[:, i : i + 1], use_cache=True, **{name: cache})
            caches.append(cache)
        crop = 3 if session is None else _crop(caches[0], 3)
        assert crop == 57 and all(layer.store.state == {} for layer in caches[0].layers)
        for layer in caches[1].layers:
            layer.store.state.clear()
        one, two = (exact(ids[:, 57:58], use_cache=True, **{name: c}).logits for c in caches)
    torch.testing.assert_close(one, two, atol=1e-9, rtol=0)


def test_an_extension_starts_the_selection_anew(exact: Any) -> None:
    """After a forward of several tokens every head retrieves again: a shared set would miss them."""
    ids, name = tokens(1, 70), cache_name(exact)
    for tail in (5, 2):
        recorder = Recorder()
        with sparsify(exact, CIS(**{**SMALL, "tau": -1.0})) as session, torch.no_grad():
            cache = session.new_cache()
            exact(ids[:, :50], use_cache=True, **{name: cache})
            for i in range(50, 52):
                exact(ids[:, i : i + 1], use_cache=True, **{name: cache})
            session.recorder = recorder
            exact(ids[:, 52 : 52 + tail], use_cache=True, **{name: cache})
            assert not recorder.entries and all(layer.store.state == {} for layer in cache.layers)
            for i in range(52 + tail, 55 + tail):
                exact(ids[:, i : i + 1], use_cache=True, **{name: cache})
        shared = [all(map(all, e["retrieved"])) for e in recorder.entries]
        assert shared == [True] * 4 + [False] * 8


def _crop(cache: Any, columns: int) -> int:
    cache.crop(-columns)
    return int(cache.get_seq_length())


@pytest.mark.parametrize("gate", ["score", "query", "key", "hidden"])
def test_fork_decodes_with_several_methods_from_one_prefill(exact: Any, gate: Any) -> None:
    ids, name = tokens(1, 60), cache_name(exact)
    with sparsify(exact, CIS(**SMALL, gate=gate, tau=0.1)) as session, torch.no_grad():
        cache = session.new_cache()
        exact(ids[:, :52], use_cache=True, **{name: cache})

        def loop(c: Any) -> Tensor:
            return torch.cat([exact(ids[:, i : i + 1], use_cache=True, **{name: c}).logits for i in range(52, 60)], 1)

        first, second = loop(prehoc.fork(cache)), loop(prehoc.fork(cache))
        assert torch.equal(first, second) and cache.get_seq_length() == 52
        half = prehoc.fork(cache)
        a = torch.cat([exact(ids[:, i : i + 1], use_cache=True, **{name: half}).logits for i in range(52, 55)], 1)
        other = prehoc.fork(half)  # in the middle of a block
        for c in (half, other):
            b = torch.cat([exact(ids[:, i : i + 1], use_cache=True, **{name: c}).logits for i in range(55, 60)], 1)
            assert torch.equal(torch.cat([a, b], 1), first)


# ------------------------------------------------------------------------------------------------- loops, copies, threads


@pytest.mark.parametrize("method", ["dense", "cis", "cpe"])
def test_a_loop_of_your_own_equals_generate(exact: Any, method: str) -> None:
    chosen = {"dense": prehoc.Dense(), "cis": CIS(**SMALL), "cpe": CPE(**SMALL, **DEPTH)}[method]
    ids, mask = padded((0, 21), 52)
    with sparsify(exact, chosen):
        sequences, logits = generated(exact, ids, mask)
        longer = torch.cat([mask, torch.ones(2, 10, dtype=mask.dtype)], 1)
        own = forced(exact, sequences, 52, longer)
    torch.testing.assert_close(own[:, :-1].float(), logits.float(), atol=1e-5, rtol=0)


def test_inputs_embeds(exact: Any) -> None:
    ids = tokens(1, 52)
    embeds = exact.get_input_embeddings()(ids)
    with sparsify(exact, CPE(**SMALL, **DEPTH)):
        wanted = generated(exact, ids)[0][:, 52:]
        got = exact.generate(inputs_embeds=embeds, max_new_tokens=10, do_sample=False)
    assert torch.equal(got, wanted)


def test_use_cache_false_prunes_the_prompt_by_depth(exact: Any) -> None:
    ids = tokens(1, 60)
    with sparsify(exact, PSAW(phi=0.3, start_layer=1, sink=2, local=6)), torch.no_grad():
        with_cache = exact(ids, use_cache=True).logits
        without = exact(ids, use_cache=False)
    assert getattr(without, cache_name(exact)) is None
    torch.testing.assert_close(without.logits, with_cache, atol=1e-9, rtol=0)


@pytest.mark.parametrize("gate", ["score", "query", "hidden"])
def test_a_deep_copy_runs_its_own_weights(gate: Any) -> None:
    net = families.fresh("llama", torch.float64)
    ids = tokens(1, 52)
    with sparsify(net, CPE(**SMALL, **DEPTH, gate=gate, tau=0.1)) as session:
        wanted = generated(net, ids)
        twin = copy.deepcopy(net)
        assert torch.equal(generated(twin, ids)[1], wanted[1])
        before = session.report().decode.steps
        for parameter in twin.parameters():
            parameter.data.mul_(1.1)
        changed = generated(twin, ids)
        assert not torch.equal(changed[1], wanted[1])
        assert session.report().decode.steps == before  # the copy keeps its own books
        assert torch.equal(generated(net, ids)[1], wanted[1])
    plain = generated(net, ids)
    assert net.config._attn_implementation == "sdpa"
    assert torch.equal(generated(twin, ids)[1], changed[1])  # the copy is still attached
    twin._prehoc_session.detach()
    assert twin.config._attn_implementation == "sdpa"
    assert torch.equal(generated(net, ids)[1], plain[1])


class Streamer:
    """What TextIteratorStreamer is to generate: it takes tokens as they come."""

    def __init__(self) -> None:
        self.pieces: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.pieces.append(value.cpu())

    def end(self) -> None:
        self.ended = True


def test_streaming_from_another_thread(net: Any) -> None:
    ids = tokens(1, 52)
    with sparsify(net, CPE(**SMALL, **DEPTH)):
        wanted = net.generate(ids, max_new_tokens=10, do_sample=False)
        streamer = Streamer()
        options = {"inputs": ids, "streamer": streamer, "max_new_tokens": 10, "do_sample": False}
        thread = threading.Thread(target=net.generate, kwargs=options)
        thread.start()
        thread.join(60)
    assert streamer.ended and len(streamer.pieces) == 11
    assert torch.equal(torch.cat([p.view(-1) for p in streamer.pieces]), wanted[0])


def test_threads_do_not_mix(exact: Any) -> None:
    """Two prompts of different length and padding, generated at the same time on one attached model."""
    batches = [padded((0, 31), 52, seed=1), padded((5,), 44, seed=2), padded((0,), 60, seed=3)]
    results: dict[int, list[Tensor]] = {i: [] for i in range(len(batches))}
    failures: list[BaseException] = []
    with sparsify(exact, CPE(**SMALL, **DEPTH), audit=0.5):
        wanted = [generated(exact, *batch)[1] for batch in batches]
        gate = threading.Barrier(len(batches))

        def work(i: int) -> None:
            try:
                gate.wait(60)
                for _ in range(4):
                    results[i].append(generated(exact, *batches[i])[1])
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(batches))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert not failures
    for i, logits in enumerate(wanted):
        assert len(results[i]) == 4 and all(torch.equal(x, logits) for x in results[i])


def test_an_error_in_the_middle_leaves_the_session_usable(exact: Any) -> None:
    ids = tokens(1, 52)
    with sparsify(exact, CPE(**SMALL, **DEPTH)):
        wanted = generated(exact, ids)[1]

        class Stop(tf.StoppingCriteria):
            def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
                raise RuntimeError("stop here")

        with pytest.raises(RuntimeError, match="stop here"):
            exact.generate(ids, max_new_tokens=5, stopping_criteria=tf.StoppingCriteriaList([Stop()]))
        assert torch.equal(generated(exact, ids)[1], wanted)


def test_observing_generates_as_dense_does(exact: Any) -> None:
    ids, mask = padded((0, 25), 52)
    dense = generated(exact, ids, mask)
    with sparsify(exact, CPE(**SMALL, **DEPTH), observe=True, audit=1.0) as session:
        seen = generated(exact, ids, mask)
        report = session.report()
    torch.testing.assert_close(seen[1], dense[1], atol=1e-5, rtol=0)
    assert report.decode.retrievals > 0 and 0.3 < report.retained_mass[0] < 1
    assert report.prefill.pairs == report.prefill.pairs_dense and report.prefill.rows == report.prefill.rows_dense


# ---------------------------------------------------------------------------------------------------------------- books


class Recorder:
    """Keeps plain numbers of every decision."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def record(self, step: Step, v: Tensor, decision: Decision) -> None:
        chosen, (_, hkv, n, d) = decision.selection, step.k.shape
        entry: dict[str, Any] = {
            "layer": step.layer,
            "n": n,
            "pads": step.rows.pad,
            "masked": step.masked,
            "size": step.k.element_size(),
        }
        entry |= {"masked": step.masked, "hkv": hkv, "d": d, "dv": v.shape[-1], "h": step.q.shape[1]}
        if isinstance(chosen, Selection):
            entry["lists"] = [[[j for j in head if j >= 0] for head in row] for row in chosen.indices.tolist()]
            assert decision.retrieved is not None
            entry["retrieved"], entry["counted"] = decision.retrieved.tolist(), decision.counted
        elif isinstance(chosen, Window):
            entry["window"] = [
                [j for j in range(pad, n) if j < pad + chosen.sink or j >= start]
                for pad, start in zip(step.rows.pad, chosen.start, strict=True)
            ]
        entry["mass"] = [
            [
                torch.softmax(
                    step.k[r, g * hkv // step.q.shape[1], pad:].double() @ step.q[r, g].double() * step.scale, 0
                )
                for g in range(step.q.shape[1])
            ]
            for r, pad in enumerate(step.rows.pad)
        ]
        self.entries.append(entry)


BOOKS = {
    "dense": prehoc.Dense(),
    "cis": CIS(**SMALL),
    "cis-query-head": CIS(**SMALL, granularity="query_head"),
    "cis-block": CIS(**SMALL, refresh="block", local_window="sliding"),
    "cis-query": CIS(**SMALL, gate="query"),
    "cis-key": CIS(**SMALL, gate="key", tau=0.1),
    "cis-hidden": CIS(**SMALL, gate="hidden", tau=0.1, granularity="query_head"),
    "covered": CIS(**{**SMALL, "critical": 400}),
    "oracle": prehoc.Oracle(sink=2, local=6, critical=10),
    "streaming": prehoc.Streaming(sink=2, budget=18),
    "psaw": PSAW(phi=0.3, start_layer=1, sink=2, local=6),
    "cpe": CPE(**SMALL, **DEPTH),
}


@pytest.mark.parametrize(("family", "backend"), [("llama", "auto"), ("llama", "reference"), ("gemma3", "auto")])
@pytest.mark.parametrize("name", BOOKS)
def test_books_balance(name: str, family: str, backend: str) -> None:
    """Every number of the report is counted again from the recorded decisions, with loops."""
    net, recorder = families.model(family), Recorder()
    ids, mask = padded((0, 17, 44), 52)
    with sparsify(net, BOOKS[name], audit=0.0, backend=backend) as session:
        session.recorder = recorder
        generated(net, ids, mask, 14)
        d = session.report().decode
        copies = session.backend == "reference" and name.startswith(("cis", "cpe")) and name != "cis-block"
    layers = 2 if family == "gemma3" else 4
    assert d.steps == 13 and len(recorder.entries) == 13 * layers
    found: set[int] = set()  # layers that have found the axes of their gate
    keys = visible = counted = hits = scored = processed = dense = triples = indices = copied = anchors = 0
    for e in recorder.entries:
        n, hkv, pair = e["n"], e["hkv"], (e["d"] + e["dv"]) * e["size"]
        real = [n - pad for pad in e["pads"]]
        dense += sum(real) * hkv * pair
        if "lists" in e:
            along = e["h"] * min(e["d"], 16) + hkv * e["d"] * min(e["d"], 16)  # the anchors, and the axes of a row
            vectors = {"cis-query": e["h"] * e["d"], "cis-key": hkv * e["d"], "cis-hidden": 48}.get(name, along)
            anchors += len(real) * vectors * 4 * (name != "oracle")
            if vectors == along and name != "oracle" and e["layer"] not in found:
                found.add(e["layer"])
                scored += sum(real) * hkv * e["d"] * e["size"]  # fewer keys than are sampled
            for row, lists in enumerate(e["lists"]):
                for head, used in enumerate(lists):
                    triples, visible = triples + 1, visible + real[row]
                    keys, processed = keys + len(used), processed + len(used) * pair
                    indices += len(used) * 4
                    counted += e["counted"][row]
                    if e["retrieved"][row][head]:
                        assert e["counted"][row]
                        hits += 1
                        begin = max(2, e["masked"][row])
                        scored += (2 + real[row] - begin) * e["d"] * e["size"]
                        copied += len(used) * pair * copies
        else:
            lists = e.get("window", [list(range(pad, n)) for pad in e["pads"]])
            heads = e["h"] if name in ("cis-query-head", "cis-hidden") else hkv
            for row, used in enumerate(lists):
                triples, visible = triples + heads, visible + real[row] * heads
                keys, processed = keys + len(used) * heads, processed + len(used) * hkv * pair
    hkv, pair = recorder.entries[0]["hkv"], (recorder.entries[0]["d"] * 2) * 4
    if family == "gemma3":  # the sliding layers: the last 21 real keys of each row
        for step in range(13):
            for pad in (0, 17, 44):
                seen = min(53 + step - pad, 21)
                triples, visible, keys = triples + 2 * hkv, visible + 2 * hkv * seen, keys + 2 * hkv * seen
                processed, dense = processed + 2 * hkv * seen * pair, dense + 2 * hkv * seen * pair
    assert (d.triples, d.keys_visible, d.keys_read) == (triples, visible, keys)
    assert (d.counted_triples, d.retrievals, d.bytes_scored) == (counted, hits, scored)
    assert (d.bytes_processed, d.bytes_dense, d.bytes_indices) == (processed, dense, indices)
    assert d.bytes_anchors == anchors
    assert d.bytes_copied == copied and (copied > 0) == copies
    assert d.triples == d.counted_triples + d.covered_triples + d.dense_triples + d.window_triples + d.sliding_triples
    parts = {k: v for k, v in vars(d).items() if k.startswith("bytes_") and k not in ("bytes_dense", "bytes_read")}
    assert d.bytes_read == sum(parts.values())
    if counted:
        assert d.retrieval_ratio == hits / counted
        assert hits < counted or name not in ("cis-key", "cis-hidden"), "a gate that never opens shows nothing"
    else:
        assert math.isnan(d.retrieval_ratio)
        assert (d.bytes_read < d.bytes_dense) == (name in ("streaming", "psaw", "cpe"))


@pytest.mark.parametrize("name", ["cis", "cis-query-head", "cpe", "streaming", "psaw"])
def test_a_full_audit_is_the_mean_retained_mass(name: str) -> None:
    """audit=1 measures every pruned triple: its mean is computed here from the recorded weights."""
    net, recorder = families.model("llama"), Recorder()
    ids, mask = padded((0, 17, 44), 52)
    with sparsify(net, BOOKS[name], audit=1.0) as session:
        session.recorder = recorder
        generated(net, ids, mask, 12)
        report = session.report()
    masses = []
    for e in recorder.entries:
        if "lists" not in e and "window" not in e:
            continue
        for row, pad in enumerate(e["pads"]):
            if "lists" in e and not e["counted"][row] and not e["masked"][row]:
                continue  # reads everything; a covered row whose depth window hides something does not
            lists = e["lists"][row] if "lists" in e else [e["window"][row]] * e["hkv"]
            for head, used in enumerate(lists):
                group = e["h"] // len(lists)
                kept = [e["mass"][row][head * group + g][[j - pad for j in used]].sum().item() for g in range(group)]
                masses.append(sum(kept) / group)
    assert report.audited == len(masses)
    mean, low, high = report.retained_mass
    assert mean == pytest.approx(sum(masses) / len(masses), abs=1e-5) and low <= mean <= high


def test_the_audit_is_seeded_and_changes_nothing(net: Any) -> None:
    ids, reports, logits = tokens(2, 52), [], []
    for audit, seed in ((0.2, 1), (0.2, 1), (0.2, 2), (0.0, 1)):
        with sparsify(net, CIS(**SMALL), audit=audit, seed=seed) as session:
            logits.append(generated(net, ids, new=12)[1])
            reports.append(session.report())
    assert all(torch.equal(logits[0], x) for x in logits)
    assert reports[0].retained_mass == reports[1].retained_mass != reports[2].retained_mass
    assert reports[3].audited == 0 and math.isnan(reports[3].retained_mass[0])
    share = reports[0].audited / reports[0].decode.counted_triples
    assert 0.1 < share < 0.3
    assert "audited, n = " in str(reports[0]) and "not audited" in str(reports[3])
    assert reports[3].to_dict()["retained_mass"]["mean"] is None


def test_reset_starts_the_books_anew(net: Any) -> None:
    with sparsify(net, CIS(**SMALL)) as session:
        generated(net, tokens(1, 52))
        first = session.report()
        session.reset()
        assert session.report().decode.steps == 0 and session.report().prefill.tokens == 0
        generated(net, tokens(1, 52))
        second = session.report()
    assert vars(first.decode) == vars(second.decode)


@pytest.mark.parametrize("kv", ["project", "share"])
def test_prefill_operations_are_counted(net: Any, kv: Any) -> None:
    """Rows, pairs and operations of an unpadded prompt, from the schedules and the weights' shapes."""
    etf = ETF(psi=0.3, start_layer=1, kv=kv)
    ids, new = tokens(2, 200), 1
    with sparsify(net, etf) as session:
        generated(net, ids, new=new)
        p = session.report().prefill
    frozen = [etf.frozen(layer, 4, 200) for layer in range(4)]
    assert frozen[0] == frozen[1] == 0 < frozen[2] < frozen[3]
    assert (p.forwards, p.tokens, p.rows_dense) == (1, 400, 1600)
    assert p.rows == 2 * sum(200 - f for f in frozen)
    assert p.pairs_dense == 2 * 4 * 200 * 201 // 2
    seen = 2 * sum((200 * 201 - f * (f + 1)) // 2 for f in frozen)
    assert seen <= p.pairs < p.pairs_dense
    layer, attention = 48 * 16 * (6 + 2 + 2 + 6) + 3 * 48 * 56, 48 * 16 * (6 + 2 + 2 + 6)
    assert p.operations_dense == 2 * 400 * 4 * layer + 4 * p.pairs_dense * 6 * 16
    done = sum(2 * 2 * ((200 - f) * layer + (f * attention if kv == "project" else 0)) for f in frozen)
    assert p.operations == done + 4 * p.pairs * 6 * 16


def test_prefill_pairs_of_psaw(net: Any) -> None:
    psaw = PSAW(phi=0.1, alpha=2.0, start_layer=1, sink=2, local=6)
    with sparsify(net, psaw) as session:
        generated(net, tokens(1, 400), new=1)
        p = session.report().prefill
    seen = 0
    for layer in range(4):
        hidden = psaw.masked(layer, 4)
        for t in range(1, 401):
            low = hidden(t) if hidden else 0
            seen += sum(1 for j in range(t) if j < 2 or j >= low)
    assert p.pairs_dense == 4 * 400 * 401 // 2
    assert seen <= p.pairs < 0.9 * p.pairs_dense
    assert p.operations < p.operations_dense and p.rows == p.rows_dense


# ---------------------------------------------------------------------------------- PSAW and ETF against a forward of our own


def reference(net: Any, ids: Tensor, prompt: int, psaw: PSAW | None, etf: ETF | None) -> Tensor:
    """Logits ``[n - prompt + 1, V]`` of one unpadded row, by the formulas, with full masks and no shortcut (Llama)."""
    base, n, total = net.model, ids.shape[0], len(net.model.layers)
    hidden = base.embed_tokens(ids)
    cos, sin = base.rotary_emb(hidden[None], torch.arange(n)[None])
    cos, sin = cos[0], sin[0]

    def rotated(x: Tensor, rows: slice) -> Tensor:  # [h, t, d]
        one, two = x.chunk(2, -1)
        return x * cos[rows] + torch.cat([-two, one], -1) * sin[rows]

    def heads(x: Tensor, weights: nn.Linear, d: int) -> Tensor:
        return weights(x).view(x.shape[0], -1, d).transpose(0, 1)

    def share(layer: int, start: float, base_: float, power: float) -> float:
        first = math.floor(start * total) if isinstance(start, float) else start
        return 0.0 if layer <= first else 1 - base_ ** (power * (layer - first) / (total - first))

    def hides(layer: int, t: int) -> int:
        if psaw is None:
            return 0
        return max(0, min(math.floor(share(layer, psaw.start_layer, psaw.phi, psaw.alpha) * t), t - psaw.local))

    def freezes(layer: int) -> int:
        if etf is None:
            return 0
        return max(0, min(math.floor(share(layer, etf.start_layer, etf.psi, etf.gamma) * prompt), prompt - 1))

    keys: list[Tensor] = []
    values: list[Tensor] = []
    logits = []
    state = hidden[:prompt]
    for begin in range(prompt - 1, n):
        rows = slice(0, prompt) if begin < prompt else slice(begin, begin + 1)
        if begin >= prompt:
            state = hidden[rows]
        for number, layer in enumerate(base.layers):
            attention = layer.self_attn
            d = attention.head_dim
            x = layer.input_layernorm(state)
            k, v = rotated(heads(x, attention.k_proj, d), rows), heads(x, attention.v_proj, d)
            frozen = freezes(number) if begin < prompt else 0
            if begin < prompt:
                if frozen and etf is not None and etf.kv == "share":  # as the layer above left them, and so on up
                    k[:, :frozen], v[:, :frozen] = keys[number - 1][:, :frozen], values[number - 1][:, :frozen]
                keys.append(k)
                values.append(v)
            else:
                keys[number] = torch.cat([keys[number], k], 1)
                values[number] = torch.cat([values[number], v], 1)
            q = rotated(heads(x, attention.q_proj, d), rows)
            out = torch.zeros_like(q)
            for row in range(frozen, q.shape[1]):
                t = rows.start + row + 1
                low = hides(number, t)
                sink = psaw.sink if psaw is not None else 0
                seen = [j for j in range(t) if j < sink or j >= low]
                for h in range(q.shape[0]):
                    g = h // (q.shape[0] // k.shape[0])
                    weights = torch.softmax(keys[number][g][seen] @ q[h, row] * d**-0.5, 0)
                    out[h, row] = weights @ values[number][g][seen]
            after = state + attention.o_proj(out.transpose(0, 1).reshape(state.shape[0], -1))
            after = after + layer.mlp(layer.post_attention_layernorm(after))
            state = torch.cat([state[:frozen], after[frozen:]])
        logits.append(net.lm_head(base.norm(state[-1])))
    return torch.stack(logits)


WRITTEN: dict[str, tuple[PSAW | None, ETF | None]] = {
    "dense": (None, None),
    "psaw": (PSAW(phi=0.3, alpha=1.3, start_layer=1, sink=2, local=5), None),
    "psaw without sinks": (PSAW(phi=0.2, alpha=1.0, start_layer=0.25, sink=0, local=3), None),
    "psaw from layer 0": (PSAW(phi=0.05, alpha=2.0, start_layer=0, sink=4, local=1), None),
    "etf": (None, ETF(psi=0.4, gamma=1.2, start_layer=1)),
    "etf share": (None, ETF(psi=0.4, gamma=1.2, start_layer=1, kv="share")),
    "etf to the last row": (None, ETF(psi=1e-20, gamma=4.0, start_layer=0)),
    "etf share to the last row": (None, ETF(psi=1e-20, gamma=4.0, start_layer=0, kv="share")),
    "both": (
        PSAW(phi=0.3, alpha=1.3, start_layer=1, sink=2, local=5),
        ETF(psi=0.3, gamma=1.0, start_layer=0.25),
    ),
    "both, share": (
        PSAW(phi=0.3, alpha=1.3, start_layer=1, sink=2, local=5),
        ETF(psi=0.3, gamma=1.0, start_layer=1, kv="share"),
    ),
}


def pruning(psaw: PSAW | None, etf: ETF | None) -> CPE | prehoc.Dense:
    if psaw is None and etf is None:
        return prehoc.Dense()
    keys: dict[str, Any] = {"parts": tuple(n for n, x in (("psaw", psaw), ("etf", etf)) if x is not None)}
    if psaw is not None:
        keys |= {"phi": psaw.phi, "alpha": psaw.alpha, "psaw_start_layer": psaw.start_layer}
        keys |= {"sink": psaw.sink, "local": psaw.local}
    if etf is not None:
        keys |= {"psi": etf.psi, "gamma": etf.gamma, "etf_start_layer": etf.start_layer, "kv": etf.kv}
    return CPE(**keys)


@pytest.mark.parametrize("name", WRITTEN)
def test_prefill_pruning_equals_the_forward_written_out(exact: Any, name: str) -> None:
    """Ragged, left-padded batch; one shot and in chunks; then decode steps."""
    psaw, etf = WRITTEN[name]
    pad, prompt, new = (0, 11, 25), 34, 3
    ids, mask = padded(pad, prompt + new, seed=5)
    with torch.no_grad():
        wanted = torch.stack([reference(exact, ids[b, p:], prompt - p, psaw, etf) for b, p in enumerate(pad)])
    with sparsify(exact, pruning(psaw, etf)):
        got = forced(exact, ids, prompt, mask)
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)
        for size in (12, 33):
            _, first = generated(exact, ids[:, :prompt], mask[:, :prompt], 1, prefill_chunk_size=size)
            torch.testing.assert_close(first[:, 0].double(), wanted[:, 0], atol=1e-5, rtol=0)
    if name != "dense":
        with torch.no_grad():
            dense = reference(exact, ids[0], prompt, None, None)
        assert (dense - wanted[0]).abs().max() > 0.01


def test_later_turns_freeze_nothing(exact: Any) -> None:
    """ETF acts on the first prompt only."""
    etf = ETF(psi=0.3, start_layer=1)
    ids, name = tokens(1, 60), cache_name(exact)
    with sparsify(exact, etf) as session, torch.no_grad():
        cache = session.new_cache()
        exact(ids[:, :40], use_cache=True, **{name: cache})
        one = session.report().prefill
        exact(ids[:, 40:], use_cache=True, **{name: cache})
        two = session.report().prefill
    assert one.rows < one.rows_dense
    assert two.rows - one.rows == two.rows_dense - one.rows_dense == 80
