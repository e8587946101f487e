"""ETF on a decoder layer: the frozen prefix only leaves its keys and values in the cache, the rest runs as always."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn

from prehoc.integrations.transformers.attention import Captured
from prehoc.integrations.transformers.forward import Forward

_INNER = "_prehoc_inner_forward"
_PER_TOKEN = ("position_ids", "cache_position")


def wrap(layer: nn.Module) -> None:
    """Put the freezing forward in front of a layer's own."""
    # an instance-level forward (accelerate's offloading) stays inside; the class's own is found by type, so that a deep
    # copy of the model runs the copy's weights
    setattr(layer, _INNER, layer.__dict__.get("forward"))
    layer.forward = types.MethodType(_frozen_forward, layer)


def unwrap(layer: nn.Module) -> None:
    """Restore the layer's own forward."""
    inner = getattr(layer, _INNER)
    delattr(layer, _INNER)
    if inner is None:
        del layer.forward
    else:
        layer.forward = inner


def _frozen_forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    inner = getattr(self, _INNER) or functools.partial(type(self).forward, self)
    fwd: Forward | None = kwargs.get("prehoc")
    layer = int(self.self_attn.layer_idx)  # type: ignore[union-attr, arg-type]
    ends = fwd.frozen(layer) if fwd is not None else (0,)
    start, tokens = min(ends), hidden_states.shape[1]
    if fwd is None or not max(ends):
        return inner(hidden_states, *args, **kwargs)
    if args:
        raise ValueError(
            f"{type(self).__name__} takes positional arguments beyond the hidden states: ETF cannot slice them"
        )
    freeze = fwd.plan.freeze
    assert freeze is not None
    share = freeze.kv == "share"
    fwd.books.skip(start * len(ends), fwd.weights[layer][0] - (0 if share else fwd.weights[layer][1]))
    if start and share:
        below = fwd.cache.layers[layer - 1].store.views()
        span = slice(fwd.past, fwd.past + start)
        fwd.cache.layers[layer].update(below[0][:, :, span], below[1][:, :, span])
    elif start:
        fwd.capture = True
        try:
            inner(hidden_states[:, :start], **_slice(kwargs, slice(0, start), tokens))
        except Captured:
            pass
        finally:
            fwd.capture = False
    if start == tokens:
        return hidden_states
    if share and max(ends) > start:
        fwd.shared_until[layer] = tuple(fwd.past + end for end in ends)
    live = hidden_states[:, start:]
    out: Tensor = inner(live, **_slice(kwargs, slice(start, tokens), tokens))
    if max(ends) > start:  # rows whose frozen prefix reaches further keep their state
        columns = torch.arange(start, tokens, device=out.device)
        keep = columns < torch.tensor(ends, device=out.device)[:, None]  # [B, tokens - start]
        out = torch.where(keep[..., None], live, out)
    return torch.cat([hidden_states[:, :start], out], 1) if start else out


def _slice(kwargs: dict[str, Any], part: slice, tokens: int) -> dict[str, Any]:
    """Return the layer's keyword arguments for some of its tokens."""
    cut = dict(kwargs)
    embeddings = kwargs.get("position_embeddings")
    if embeddings is not None:
        fits = isinstance(embeddings, tuple) and all(
            isinstance(e, Tensor) and e.dim() == 3 and e.shape[1] == tokens for e in embeddings
        )
        if not fits:
            raise ValueError(
                "ETF needs position_embeddings (cos, sin) of shape (batch, tokens, dim); this model has others"
            )
        cut["position_embeddings"] = tuple(e[:, part] for e in embeddings)
    for name in _PER_TOKEN:
        if isinstance(kwargs.get(name), Tensor):
            cut[name] = kwargs[name][..., part]
    return cut
