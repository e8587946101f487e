"""A shape and traces small enough for the benchmarks' tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from prehoc.bench.inputs import Shape
from prehoc.trace import Trace, trace

TINY = Shape("tiny", 4, 4, 2, 8)


def record(tiny_llama: Callable[..., Path], prompt: int, steps: int, method: str = "dense", **more: Any) -> Trace:
    """Trace a tiny random Llama of 2 layers, 4 heads, 2 KV heads and a head size of 8."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama({})).eval()
    ids = torch.randint(1, 60, (prompt + steps,), generator=torch.Generator().manual_seed(prompt))
    return trace(
        model, ids, prompt, steps, method, **{"observe": True, "record": ("qkv",), "backend": "reference", **more}
    )
