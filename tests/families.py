"""Tiny random models of the supported families, and the loops that the tests run on them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import transformers as tf
from torch import Tensor

import prehoc

VOCABULARY = 89
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,  # attention with contrast: with the usual 0.02 it is flat and pruning changes nothing
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def _llama() -> Any:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**_SIZES, head_dim=16))


def _mistral() -> Any:
    return tf.MistralForCausalLM(tf.MistralConfig(**_SIZES, head_dim=8, sliding_window=None))


def _mistral_sliding() -> Any:
    return tf.MistralForCausalLM(tf.MistralConfig(**_SIZES, head_dim=8, sliding_window=21))


def _qwen2() -> Any:
    return tf.Qwen2ForCausalLM(tf.Qwen2Config(**_SIZES))


def _qwen3() -> Any:
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**_SIZES, head_dim=16))


def _gemma3() -> Any:
    sizes = {**_SIZES, "num_key_value_heads": 1, "num_attention_heads": 4}
    return tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(
            **sizes,
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=21,
            layer_types=_MIXED,
            tie_word_embeddings=False,
        )
    )


def _glm4() -> Any:
    return tf.Glm4ForCausalLM(tf.Glm4Config(**_SIZES, head_dim=16, partial_rotary_factor=0.5, attention_bias=True))


def _phi3() -> Any:
    sizes = {**_SIZES, "num_key_value_heads": 6}
    return tf.Phi3ForCausalLM(tf.Phi3Config(**sizes))


def _olmo2() -> Any:
    return tf.Olmo2ForCausalLM(tf.Olmo2Config(**_SIZES))


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mistral-sliding": _mistral_sliding,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "glm4": _glm4,
    "phi3": _phi3,
    "olmo2": _olmo2,
}
SLIDING = {"mistral-sliding", "gemma3"}  # kv="share" is refused on these


def fresh(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A new model of a family, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sum(map(ord, family)))
        model = FAMILIES[family]().eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases that start at one or zero
                parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.requires_grad_(False)
    model.set_attn_implementation("sdpa")
    return model.to(dtype)


@functools.cache
def model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a family that all tests share; detached between tests."""
    return fresh(family, dtype)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Random tokens without specials."""
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def padded(pad: tuple[int, ...], length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A left-padded batch and its mask."""
    ids = tokens(len(pad), length, seed=seed)
    mask = torch.ones_like(ids)
    for row, columns in enumerate(pad):
        ids[row, :columns] = 0
        mask[row, :columns] = 0
    return ids, mask


def generated(
    net: Any, ids: Tensor, mask: Tensor | None = None, new: int = 10, **options: Any
) -> tuple[Tensor, Tensor]:
    """Sequences ``[B, P + new]`` and raw logits ``[B, new, V]`` of a `generate` call that never stops early."""
    out = net.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=new,
        **{"do_sample": False, **options},
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences, torch.stack(out.logits, 1)


def cache_name(net: Any) -> str:
    """How this release calls the cache argument."""
    return "cache" if "cache" in inspect.signature(net.forward).parameters else "past_key_values"


@torch.no_grad()
def forced(net: Any, ids: Tensor, prompt: int, mask: Tensor | None = None, cache: Any = None) -> Tensor:
    """Logits ``[B, n - prompt + 1, V]`` of a loop of your own: one forward for the prompt, one for each token after it."""
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    name, logits, at = cache_name(net), [], 0
    for end in range(prompt, ids.shape[1] + 1):
        out = net(
            ids[:, at:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, at:end],
            use_cache=True,
            **{name: cache},
        )
        cache, at = getattr(out, name), end
        logits.append(out.logits[:, -1])
    return torch.stack(logits, 1)


def sparsify(net: Any, method: Any, **options: Any) -> AbstractContextManager[prehoc.Session]:
    """`prehoc.sparsify`; float64, which no native kernel knows, runs on the torch kernels."""
    return prehoc.sparsify(net, method, **{"backend": "reference" if net.dtype == torch.float64 else None, **options})
