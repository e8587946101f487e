"""One prefill and many decodes give what each method gives on its own."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import prehoc
from prehoc.eval.engine import Ask, Batch, Engine
from prehoc.eval.perplexity import measure
from prehoc.methods import parse_method, prefill_key
from prehoc.trace import forced_logits

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
METHODS = ("dense", "cis:critical=5,sink=2,local=3", "oracle:critical=4", "streaming:budget=20,sink=2")


def never(tokens: list[int]) -> None:
    return None


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **SIZES)).eval()
    for weights in model.parameters():
        weights.data *= 3  # a random model of usual scale answers with one token for ever
    return model


@pytest.fixture(scope="module")
def sliding() -> MistralForCausalLM:
    torch.manual_seed(1)
    config = MistralConfig(num_hidden_layers=2, sliding_window=16, **SIZES)
    config.layer_types = ["sliding_attention", "full_attention"]
    return MistralForCausalLM(config).eval()


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(1, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def alone(model: torch.nn.Module, method: str, ids: list[int], new: int) -> list[int]:
    with prehoc.sparsify(model, method, backend="reference"):
        out = model.generate(  # type: ignore[operator]
            torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None
        )
    return out[0, len(ids) :].tolist()


def run(model: torch.nn.Module, method: str, prompts: list[list[int]], asks: list[Ask], **more: object) -> Batch:
    engine, parsed = Engine(model, "reference", audit=1.0), parse_method(method)
    read = engine.prefill(parsed, prompts, max(ask.columns for ask in asks))
    return engine.decode(parsed, read, asks, ended=never, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "method", [*METHODS, "psaw:local=4,phi=0.5", "cpe:critical=5,sink=2,local=3", "snapkv:critical=8,local=4"]
)
def test_a_decode_is_what_generate_gives(llama: LlamaForCausalLM, method: str) -> None:
    (row,) = run(llama, method, [prompt(41)], [Ask(new_tokens=9)]).rows
    assert row.tokens == alone(llama, method, prompt(41), 9)
    assert len(set(row.tokens)) > 1, "the model must have something to say"
    assert row.steps == 8 and row.finish == "length"


def test_methods_share_a_prefill_and_leave_it_as_it_was(llama: LlamaForCausalLM) -> None:
    engine = Engine(llama, "reference")
    read = engine.prefill(parse_method("dense"), [prompt(41)], 9)
    for name in [*METHODS, *METHODS]:
        (row,) = engine.decode(parse_method(name), read, [Ask(new_tokens=9)], ended=never).rows
        assert row.tokens == alone(llama, name, prompt(41), 9), name


def test_which_methods_share_a_prefill() -> None:
    keys = {
        name: prefill_key(parse_method(name)) for name in (*METHODS, "psaw", "psaw:phi=0.5", "cpe", "cpe-16", "etf")
    }
    assert len({keys[name] for name in METHODS}) == 1
    assert keys["cpe"] == keys["cpe-16"] != keys["dense"]
    assert len({keys[name] for name in ("dense", "psaw", "psaw:phi=0.5", "cpe", "etf")}) == 5
    own = ("snapkv", "snapkv:local=8", "h2o", "auto")  # they look at the prompt themselves
    assert len({*keys.values(), *(prefill_key(parse_method(name)) for name in own)}) == 5 + len(own)
    for one, other in (("h2o", "h2o:budget=64"), ("snapkv", "snapkv:budget=64,kernel=7")):
        assert prefill_key(parse_method(one)) == prefill_key(parse_method(other)), "they see the same in a prompt"


@pytest.mark.parametrize(
    "methods",
    [
        ("h2o:critical=9,sink=2,local=3", "h2o:critical=5,sink=2,local=3"),
        ("snapkv:critical=8,local=4", "snapkv:critical=5,local=4,kernel=3"),
    ],
)
def test_evicting_methods_share_what_they_see_of_a_prompt(llama: LlamaForCausalLM, methods: tuple[str, str]) -> None:
    engine = Engine(llama, "reference")
    read = engine.prefill(parse_method(methods[0]), [prompt(41)], 9)
    for name in (*methods, *methods):
        (row,) = engine.decode(parse_method(name), read, [Ask(new_tokens=9)], ended=never).rows
        assert row.tokens == alone(llama, name, prompt(41), 9), name
    with prehoc.sparsify(llama, methods[0], backend="reference") as session:
        cache = session.new_cache()
        llama(torch.tensor([prompt(41)]), use_cache=True, past_key_values=cache)
        llama(torch.tensor([[5]]), use_cache=True, past_key_values=cache)
    with (
        prehoc.sparsify(llama, methods[1], backend="reference"),
        pytest.raises(ValueError, match="which it has not seen"),
    ):
        llama(torch.tensor([[6]]), use_cache=True, past_key_values=cache)  # keys are gone: nobody else goes on with it


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "sliding"])
def test_rows_of_a_padded_batch_are_rows_alone(request: pytest.FixtureRequest, family: str, method: str) -> None:
    model = request.getfixturevalue(family)
    prompts = [prompt(41), prompt(23, 1), prompt(30, 2)]
    # rows that end at different steps, one of which is fed a question
    asks = [Ask(new_tokens=7), Ask(tuple(prompt(5, 3)), 4), Ask(new_tokens=1)]
    together = run(model, method, prompts, asks).rows
    for i, (ids, ask) in enumerate(zip(prompts, asks, strict=True)):
        (single,) = run(model, method, [ids], [ask]).rows
        assert together[i].tokens == single.tokens
        assert together[i].steps == single.steps == len(ask.forced) + len(single.tokens) - 1
        assert together[i].masses == pytest.approx(single.masses, abs=1e-6)
        if (family, i) == ("llama", 0) and method.startswith("cis"):
            assert single.masses


def test_a_fed_question_is_read_as_part_of_the_prompt_would_be(llama: LlamaForCausalLM) -> None:
    ids = prompt(50)
    (fed,) = run(llama, "dense", [ids[:38]], [Ask(tuple(ids[38:]), 6)]).rows
    assert fed.tokens == alone(llama, "dense", ids, 6)
    assert fed.steps == 12 + 5


@pytest.mark.parametrize("method", ["dense", "cis:critical=5,sink=2,local=3"])
def test_scored_tokens_are_those_of_a_teacher_forced_decode(llama: LlamaForCausalLM, method: str) -> None:
    windows = torch.tensor([prompt(60), prompt(60, 1)])
    asks = [Ask(tuple(row[48:].tolist()), score=True) for row in windows]
    batch = run(llama, method, [row[:48].tolist() for row in windows], asks)
    found = measure(llama, method, windows, 12, backend="reference")
    for row, expected in zip(batch.rows, found.continuation_nll, strict=True):
        assert sum(row.nll) / 12 == pytest.approx(expected, rel=1e-5)
        assert len(row.tokens) == 12 and row.steps == 11


def test_prompts_are_measured_where_their_logits_mean_something(llama: LlamaForCausalLM) -> None:
    engine = Engine(llama, "reference")
    read = engine.prefill(parse_method("psaw"), [prompt(60)], 1, nll=True)
    whole = measure(llama, "psaw", torch.tensor([prompt(60)]), 1, backend="reference").window_nll
    assert read.nll is not None and whole is not None
    assert read.nll[0] == pytest.approx(whole[0], rel=1e-5)
    assert engine.prefill(parse_method("etf"), [prompt(60)], 1, nll=True).nll is None


def test_kl_compares_distributions_behind_the_same_tokens(llama: LlamaForCausalLM) -> None:
    engine, ask = Engine(llama, "reference"), Ask(new_tokens=9)
    read = engine.prefill(parse_method("dense"), [prompt(41)], 9)
    dense = engine.decode(parse_method("dense"), read, [ask], ended=never, remember=True).rows
    name = "streaming:budget=6,sink=2"
    (row,) = engine.decode(parse_method(name), read, [ask], ended=never, references=dense).rows
    common = next(i for i, (a, b) in enumerate(zip(row.tokens, dense[0].tokens, strict=True)) if a != b)
    ids = torch.tensor([prompt(41) + row.tokens[:common]])
    logs = []
    for method in ("dense", name):
        with prehoc.sparsify(llama, method, backend="reference"):
            logs.append([found[0].log_softmax(-1) for found in forced_logits(llama, ids, 41)])
    expected = [float((a.exp() * (a - b)).sum()) for a, b in zip(*logs, strict=True)]
    assert row.kl == pytest.approx(expected, abs=1e-5) and len(row.kl) == common + 1
    assert row.kl[0] == pytest.approx(0, abs=1e-6), "the first token comes from the shared prefill"
    assert max(row.kl) > 1e-3


def test_a_budget_that_covers_the_text_reads_all_and_changes_nothing(llama: LlamaForCausalLM) -> None:
    dense = run(llama, "dense", [prompt(41)], [Ask(new_tokens=9)], remember=True)
    covered = run(llama, "cis:critical=400", [prompt(41)], [Ask(new_tokens=9)], references=dense.rows)
    assert covered.rows[0].tokens == dense.rows[0].tokens
    assert covered.rows[0].kl == pytest.approx([0] * 9, abs=1e-6)
    assert covered.traffic.keys_read == covered.traffic.keys_visible


def test_an_end_token_is_not_part_of_the_answer(llama: LlamaForCausalLM) -> None:
    whole = alone(llama, "dense", prompt(41), 9)
    end = next(token for token in whole[1:] if token != whole[0])

    def ended(tokens: list[int]) -> str | None:
        return "eos" if tokens[-1] == end else None

    engine = Engine(llama, "reference")
    read = engine.prefill(parse_method("dense"), [prompt(41)], 9)
    (row,) = engine.decode(parse_method("dense"), read, [Ask(new_tokens=9)], ended=ended).rows
    assert row.finish == "eos" and row.tokens == whole[: whole.index(end)]
    assert row.steps == len(row.tokens), "the end token itself came out of a decode step"
