"""Linear layers with weights as the processor's matrix kernels read them: laid out once, not read badly at every call."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_NOTHING = (
    "packed: {model} has no linear layer to pack: layers on the CPU, in float32{also}, that no other library has changed; "
    "leave packed out"
)
# by the address of the weight: a compiled graph, which knows weights alone, finds them too
_copies: dict[int, Tensor] = {}


@contextlib.contextmanager
def packed(model: nn.Module) -> Iterator[int]:
    """Run a model's linear layers from packed copies of their weights.

    Torch multiplies few rows by a weight that lies as it was stored. oneDNN, which torch brings, is faster by far with a
    weight in blocks of its own. Works with stock transformers, with every method, inside `sparsify` and under
    ``torch.compile``; outputs agree within rounding. Where gradients are recorded, and under autocast, the layers run as
    they were.

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
    layers, addresses = packable(model), []
    _register()
    try:
        for layer in layers:  # into the instance, where it hides the class's own
            addresses.append(layer.weight.data_ptr())
            _copies[addresses[-1]] = _pack(layer.weight)
            layer.__dict__["forward"] = types.MethodType(_forward, layer)
        yield sum(layer.weight.nbytes for layer in layers)
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)
        for address in addresses:
            _copies.pop(address, None)


def is_packed(model: nn.Module) -> bool:
    """Tell whether `packed` holds for a model."""
    return next(("forward" in module.__dict__ for module in model.modules() if type(module) is nn.Linear), False)


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


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or x.dtype != layer.weight.dtype:
        return nn.Linear.forward(layer, x)
    if torch.compiler.is_compiling():  # its graph cannot hold a weight in blocks
        out: Tensor = torch.ops.prehoc.packed_linear(x, layer.weight, layer.bias)
        return out
    return _multiply(x, layer.weight, layer.bias)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by the copy of a weight, or by the weight itself where there is none: in a deep copy of the model."""
    copy = _copies.get(weight.data_ptr())
    if copy is None:
        return F.linear(x, weight, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, copy, bias, "none", [], "")
    return out


@functools.cache
def _register() -> None:
    from prehoc.kernels.ops import register

    def fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return x.new_empty((*x.shape[:-1], weight.shape[0]))

    register("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _multiply, fake)
