"""``auto``: dense below the break-even of this machine, CPE from there on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import prehoc
from prehoc import kernels
from prehoc.bench import breakeven
from prehoc.bench.breakeven import BreakEven
from prehoc.methods import CPE, Auto, parse_method

KEYS = "budget=48,local=16"


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_llama({})).eval()


def measured(length: int | None) -> BreakEven:
    times = (1.0, 1.0)
    return BreakEven("cpe", (64, length or 128), times, (2.0, 2.0 if length is None else 0.5), (None, None))


def answer(model: Any, method: Any, tokens: int) -> tuple[torch.Tensor, int, int]:
    ids = torch.arange(tokens)[None] % 60 + 1
    with prehoc.sparsify(model, method, audit=0, seed=0) as session, torch.inference_mode():
        out = model.generate(ids, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)
        session.books.flush()
    traffic = session.books.traffic
    return torch.stack(out.logits), traffic.dense_triples, traffic.triples


def test_short_prompts_are_dense_and_long_ones_are_cpe(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load(*args: Any, **more: Any) -> BreakEven:
        asked.append(args)
        return measured(90)

    monkeypatch.setattr(breakeven, "load", load)
    for tokens, same in ((89, "dense"), (90, f"cpe:{KEYS}")):
        logits, dense, triples = answer(model, f"auto:{KEYS}", tokens)
        assert torch.equal(logits, answer(model, same, tokens)[0])
        assert (dense == triples > 0) if same == "dense" else dense == 0
    shape, dtype, method, backend = asked[0]
    assert (shape.layers, shape.heads, shape.kv_heads, shape.dim) == (
        model.config.num_hidden_layers,
        model.config.num_attention_heads,
        model.config.num_key_value_heads,
        model.config.head_dim,
    )
    assert backend == kernels.resolve("auto", model.device)
    assert dtype == model.dtype and method == CPE(budget=48, local=16), "what was measured is the method without 'auto'"
    prehoc.attach(model, f"auto:{KEYS}", backend="reference").detach()
    assert asked[-1][3] == "reference"


def test_a_method_that_never_pays_is_never_used(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakeven, "load", lambda *args, **more: measured(None))
    logits, dense, triples = answer(model, Auto(budget=48, local=16), 120)
    assert dense == triples and torch.equal(logits, answer(model, "dense", 120)[0])


def test_without_a_measurement_it_is_dense_and_says_how_to_measure(model: Any) -> None:
    with pytest.warns(RuntimeWarning, match="stays dense: its break-even was not measured.*prehoc bench break-even"):
        _, dense, triples = answer(model, f"auto:{KEYS}", 120)
    assert dense == triples


def test_takes_the_keys_of_cpe() -> None:
    assert parse_method("auto:budget=512,phi=0.6").method() == parse_method("cpe:budget=512,phi=0.6")
    with pytest.raises(ValueError, match="budget=47"):
        parse_method("auto:budget=47")
