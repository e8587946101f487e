"""Linear layers with weights as the processor's matrix kernels read them: laid out once, not read badly at every call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

_NOTHING = (
    "packed: {model} has no linear layer to pack: layers on the CPU, in float32{also}, that no other library has changed; "
    "leave packed out"
)


@contextlib.contextmanager
def packed(model: nn.Module) -> Iterator[int]:
    """Run a model's linear layers from packed copies of their weights.

    Torch multiplies few rows by a weight that lies as it was stored. oneDNN, which torch brings, is faster by far with a
    weight in blocks of its own. Works with stock transformers, with every method and inside `sparsify`; outputs agree within
    rounding. Where gradients are recorded, under autocast and inside ``torch.compile``, the layers run as they were.

    Parameters
    ----------
    model : Module
        A model on the CPU. Its weights must not change meanwhile.

    Yields
    ------
    int
        Bytes of the copies: as much again as the weights of the packed layers. They are freed at the end.

    Raises
    ------
    ValueError
        When there is nothing to pack, with the reason.
    """
    layers = packable(model)
    try:
        for layer in layers:  # into the instance, where it hides the class's own
            layer.__dict__["forward"] = functools.partial(_forward, layer, _pack(layer.weight))
        yield sum(layer.weight.nbytes for layer in layers)
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def packable(model: nn.Module) -> list[nn.Linear]:
    """Return the layers that `packed` would pack; raises ValueError, as it does, when there are none."""
    if not torch.backends.mkldnn.is_available():
        raise ValueError("packed: this torch was built without oneDNN; leave packed out")
    bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    kinds = {torch.float32, torch.bfloat16} if bfloat16 else {torch.float32}
    layers = [
        module
        for module in model.modules()
        if type(module) is nn.Linear
        and "forward" not in module.__dict__
        and module.weight.device.type == "cpu"
        and module.weight.dtype in kinds
    ]
    if not layers:
        raise ValueError(_NOTHING.format(model=type(model).__name__, also=" or bfloat16" if bfloat16 else ""))
    return layers


@torch.inference_mode()
def _pack(weight: Tensor) -> Tensor:
    few = 8  # rows that the layout is chosen for: decode batches
    copy: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), few)
    return copy


def _forward(layer: nn.Linear, weight: Tensor, x: Tensor) -> Tensor:
    if (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or x.dtype != weight.dtype
    ):
        return nn.Linear.forward(layer, x)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, layer.bias, "none", [], "")
    return out
