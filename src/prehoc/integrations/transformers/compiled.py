"""Compiled decode: a model's one-token forwards run as one graph, in which a layer's whole attention is one opaque op.

The graph knows neither the cache nor the method: its only inputs are the token and its position. The op finds the forward it
belongs to in a context variable, appends to the cache, lets the method choose, and attends, as an eager step does. So
there is nothing that a longer text, a retrieval, another method or another cache would have to be compiled again for.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import inspect
import sysconfig
import types
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from prehoc.integrations.transformers.attention import decode_layer
from prehoc.integrations.transformers.compat import cache_key
from prehoc.integrations.transformers.forward import Forward
from prehoc.kernels.ops import register
from prehoc.packing import is_packed

_BACKEND: Any = "inductor"
_PLAIN = {
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "cache",
    "past_key_values",
    "use_cache",
    "prehoc",
}
_REMEDY = "leave compile=True out"

_current: contextvars.ContextVar[Forward | None] = contextvars.ContextVar("prehoc_current", default=None)
# one compiled step a model, kept while the model lives: attached again, also with another method, it is not compiled again;
# others with the hooks that hand hidden states over, because torch does not look whether hooks have changed, and with packed
# layers, so that these do not count against the graphs of the step without
_steps: weakref.WeakKeyDictionary[nn.Module, dict[tuple[bool, bool], Callable[..., Any]]] = weakref.WeakKeyDictionary()


def install(base: nn.Module, device: torch.device) -> functools.partial[None]:
    """Put the compiled forward in front of a base model's own, and return what takes it away again.

    Raises
    ------
    ValueError
        Where its decode steps cannot be compiled, with the reason and the fix.
    """
    if "forward" in base.__dict__ or any(hasattr(module, "_hf_hook") for module in base.modules()):
        raise ValueError(
            f"compile=True: {type(base).__name__} runs under another library's forward hooks (offloading, several devices), "
            f"which cannot be compiled in one graph; {_REMEDY}"
        )
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise ValueError(
            f"compile=True: {type(base).__name__} takes no position_ids, which a compiled step needs; {_REMEDY}"
        )
    if _BACKEND == "inductor" and (reason := _missing(device)) is not None:
        raise ValueError(f"compile=True: torch.compile cannot run here: {reason}, or {_REMEDY}")
    base.forward = CompiledForward(base)
    return functools.partial(delattr, base, "forward")


def _missing(device: torch.device) -> str | None:
    """Return what torch's own compiler lacks on `device` and where to get it, None when it lacks nothing."""
    if device.type == "cuda":
        found: bool = importlib.import_module("torch.utils._triton").has_triton()
        return (
            None
            if found
            else "triton is missing or does not know this device; install the version that your torch names"
        )
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "the headers of this Python are missing; install them (python3-dev or python3-devel)"
    try:
        importlib.import_module("torch._inductor.cpp_builder").get_cpp_compiler()
    except Exception as error:
        return f"no C++ compiler was found ({type(error).__name__}); install g++ (or clang++)"
    return None


class CompiledForward:
    """The forward of an attached base model whose plain decode steps run compiled; every other call runs as ever.

    Parameters
    ----------
    base : Module
        The module that runs the decoder layers. A deep copy of it calls the copy's weights.
    """

    def __init__(self, base: nn.Module) -> None:
        self._base = base
        self.__signature__ = inspect.signature(base.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one forward.

        Raises
        ------
        ValueError
            When this model cannot be compiled in one graph, with the compiler's reason.
        """
        base = self._base
        fwd: Forward | None = kwargs.get("prehoc")
        if fwd is None or fwd.phase != "decode":
            return type(base).forward(base, *args, **kwargs)
        given = {**dict(zip(self.__signature__.parameters, args, strict=False)), **kwargs}
        if (reason := _unusual(base, fwd, given)) is not None:
            warnings.warn(f"decode steps with {reason} run uncompiled", RuntimeWarning, stacklevel=2)
            return type(base).forward(base, *args, **kwargs)
        ids, embeds, positions = (given.get(name) for name in ("input_ids", "inputs_embeds", "position_ids"))
        if positions is None:
            positions = torch.full((1, 1), fwd.past, device=(ids if embeds is None else embeds).device)  # type: ignore[union-attr]
        token = _current.set(fwd)
        try:
            with torch.no_grad():
                output = _step_of(base, fwd.plan.reads_hidden)(base, ids, embeds, positions)
        except TorchDynamoException as error:
            first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise ValueError(f"{type(base).__name__} could not be compiled in one graph: {first}; {_REMEDY}") from error
        finally:
            _current.reset(token)
        output[cache_key(kwargs, base)] = fwd.cache
        return output


def _unusual(base: nn.Module, fwd: Forward, given: dict[str, Any]) -> str | None:
    """Return what a decode step brings that its graph was not made for, None without."""
    # by identity: a tensor is equal to nothing in particular
    others = [name for name, value in given.items() if name not in _PLAIN and value is not None and value is not False]
    if given.get("return_dict"):
        others.remove("return_dict")
    if others:
        return f"the argument {others[0]}"
    mask = given.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        return "a mask of the caller's own"
    if given.get("position_ids") is None and any(fwd.rows.pad):
        return "padding but without position_ids"  # models differ in what they make of it
    return "output_hidden_states" if getattr(base.config, "output_hidden_states", False) else None


def _step_of(base: nn.Module, hooked: bool) -> Callable[..., Any]:
    """Return the compiled step of a model; graphs are counted by code object, so each has a copy of the code."""
    made, kind = _steps.setdefault(base, {}), (hooked, is_packed(base))
    if kind not in made:
        own = types.FunctionType(_step.__code__.replace(), _step.__globals__)
        made.setdefault(kind, torch.compile(own, backend=_BACKEND, fullgraph=True))
    return made[kind]


def _step(base: Any, input_ids: Tensor | None, inputs_embeds: Tensor | None, position_ids: Tensor) -> Any:
    """Run the model's own forward on one token ``[B, 1]`` a row, as if there were no cache and no padding."""
    given = input_ids if inputs_embeds is None else inputs_embeds
    mask = torch.ones(given.shape[:2], dtype=torch.int64, device=given.device)  # type: ignore[union-attr]
    return type(base).forward(
        base,
        input_ids=input_ids,
        inputs_embeds=inputs_embeds,
        attention_mask=mask,
        position_ids=position_ids,
        use_cache=False,
    )


def _decode_layer(
    q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float, sliding: int | None, hidden: Tensor | None
) -> Tensor:
    """Append a layer's new key and value ``[B, Hkv, 1, D]`` to the cache and attend with q ``[B, H, 1, D]``: ``[B, H, Dv]``."""
    fwd = _current.get()
    assert fwd is not None  # `CompiledForward` set it
    keys, values = fwd.cache.layers[layer].update(k, v)
    return decode_layer(fwd, layer, q, keys, values, scale, sliding, hidden)[:, :, 0].contiguous()


def _fake_decode_layer(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], v.shape[3]))


register(
    "decode_layer(Tensor q, Tensor k, Tensor v, int layer, float scale, int? sliding, Tensor? hidden) -> Tensor",
    _decode_layer,
    _fake_decode_layer,
)
