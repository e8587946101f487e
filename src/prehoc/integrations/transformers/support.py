"""Which models can be entered through the public seams, and the reason when one cannot."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from prehoc.selection import Plan

_KINDS = {"full_attention", "sliding_attention"}


@dataclasses.dataclass(frozen=True)
class Support:
    """Whether a model is supported, and why (not); true in a boolean context when it is."""

    supported: bool
    reason: str

    def __bool__(self) -> bool:
        return self.supported


def find_base(model: nn.Module) -> tuple[nn.Module, nn.ModuleList] | None:
    """Return the module that runs the decoder layers, and the layers; None when there is none."""
    for module in model.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) and all(_is_decoder_layer(x) for x in child):
                return module, child
    return None


def _is_decoder_layer(layer: nn.Module) -> bool:
    return isinstance(getattr(getattr(layer, "self_attn", None), "layer_idx", None), int)


def supports(model: nn.Module, plan: Plan | None = None) -> Support:
    """Say whether `model` can run under prehoc, with the reason.

    Parameters
    ----------
    model : Module
        A transformers model.
    plan : Plan, optional
        Also check what this plan needs.

    Returns
    -------
    Support
        True or false, with a reason to show.
    """
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        return Support(False, f"{name} is not a transformers model with a selectable attention implementation")
    if getattr(config, "is_encoder_decoder", False):
        return Support(False, f"{name} is an encoder-decoder; prehoc supports decoder-only models")
    found = find_base(model)
    if found is None:
        return Support(
            False, f"{name} has no decoder layers with self_attn.layer_idx (linear, hybrid or other attention)"
        )
    text = config.get_text_config(decoder=True)
    types = layer_kinds(model)
    kinds = set(types)
    if kinds - _KINDS:
        return Support(
            False,
            f"{name} has layers of type {', '.join(sorted(kinds - _KINDS))}; full and sliding attention are supported",
        )
    if getattr(text, "num_kv_shared_layers", 0):
        return Support(False, f"{name} shares keys and values between layers, which prehoc's cache layers do not model")
    if getattr(text, "attn_logit_softcapping", None) is not None:
        return Support(False, f"{name} soft-caps its attention logits, which is not implemented")
    if any(hasattr(layer.self_attn, "sinks") for layer in found[1]):
        return Support(False, f"{name} has learned attention sinks, which are not implemented")
    if plan is not None and plan.freeze is not None and plan.freeze.kv == "share" and "sliding_attention" in kinds:
        return Support(
            False, f'{name} mixes sliding and full attention: kv="share" needs equal layers; use kv="project"'
        )
    full = len(found[1]) - types.count("sliding_attention")
    return Support(True, f"{name}: {len(found[1])} layers, {full} with full attention")


def layer_kinds(model: nn.Module) -> list[str]:
    """Return the kind of each layer; a config without them has one kind, as transformers' own cache reads it.

    Raises
    ------
    ValueError
        When the model has no decoder layers that prehoc knows.
    """
    found = find_base(model)
    if found is None:
        raise ValueError(f"unsupported model: {type(model).__name__} has no decoder layers that prehoc knows")
    text: Any = model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    types = getattr(text, "layer_types", None)
    if types:
        return list(types)
    sliding = getattr(text, "sliding_window", None) is not None
    return ["sliding_attention" if sliding else "full_attention"] * len(found[1])
