"""The attention and mask functions registered with transformers under the name ``prehoc``."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import sdpa_mask

from prehoc import kernels
from prehoc.integrations.transformers.forward import Forward
from prehoc.integrations.transformers.layers import KVLayer
from prehoc.kernels.prefill import causal_pairs, prefill_window
from prehoc.methods._eviction import Evictor
from prehoc.selection import Decision, Step, decide

NAME = "prehoc"


class Captured(Exception):
    """Raised right after the keys and values of frozen rows were cached: the rest of the layer is not needed."""


def prehoc_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return None for a causal mask with left padding, which the attention function knows by itself, else a 4-D mask."""
    if kwargs.get("allow_is_causal_skip", True):
        return None
    return sdpa_mask(*args, **kwargs)


def prehoc_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    prehoc: Forward | None = None,
    prehoc_hidden: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as the forward's plan says.

    Parameters
    ----------
    module : Module
        The attention module; only its `layer_idx` is read.
    query : Tensor
        ``[B, H, T, D]``.
    key, value : Tensor
        ``[B, Hkv, n, D]``, cached columns included.
    attention_mask : Tensor or None
        None, or a 4-D mask of the caller's own.
    scaling : float, optional
        Factor on the logits (default ``D ** -0.5``).
    sliding_window : int, optional
        Window of a sliding layer.
    prehoc : Forward
        This forward.
    prehoc_hidden : Tensor, optional
        ``[B, E]``, what `hand_hidden` took from the layer that this attention is part of.

    Returns
    -------
    out : Tensor
        ``[B, T, H, D]``.
    None
        Attention weights are never materialised.

    Raises
    ------
    ValueError
        For attention that is not implemented, or a mask that pruning cannot honour.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if prehoc is None and torch.compiler.is_compiling() and attention_mask is None:
        return _traced(module, query, key, value, scale, sliding_window, prehoc_hidden), None
    if prehoc is None:
        raise ValueError(
            f"{type(module).__name__} was called without its prehoc context: the model does not pass keyword arguments on to "
            "its attention; see prehoc.supports(model)"
        )
    if softcap is not None or s_aux is not None:
        raise ValueError(f"{type(module).__name__}: attention with soft-capping or learned sinks is not implemented")
    if prehoc.capture:
        raise Captured
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if attention_mask is not None:
        out = _masked(prehoc, query, key, value, attention_mask, scale)
    elif prehoc.phase == "decode" and query.shape[2] == 1:
        out = decode_layer(prehoc, layer, query, key, value, scale, sliding_window, prehoc_hidden)
    else:
        out = _prefill(prehoc, layer, query, key, value, scale, sliding_window)
    return out.transpose(1, 2), None


def hand_hidden(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass the last token's hidden state that enters a decoder layer on to its attention: a forward pre-hook."""
    hidden = args[0] if args else kwargs["hidden_states"]  # [B, T, E]
    return args, {**kwargs, "prehoc_hidden": hidden[:, -1]}


def _masked(fwd: Forward, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    if not fwd.plan.dense:
        raise ValueError(
            "this call brings a 4-D, packed or bidirectional attention mask; pruning needs a plain causal mask with left "
            "padding (method dense accepts it)"
        )
    if fwd.phase == "decode":  # what the mask hides is read all the same
        fwd.books.decision(Step(0, q[:, :, 0], k, v, scale, fwd.rows, (), fwd.backend), v.shape[-1], Decision(None))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


def _first(fwd: Forward, columns: int) -> tuple[int, ...]:
    """Return each row's first real column among the last `columns` ones (a sliding layer keeps only these)."""
    dropped = fwd.past + fwd.tokens - columns
    return tuple(max(pad - dropped, 0) for pad in fwd.rows.pad)


def _prefill(fwd: Forward, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, sliding: int | None) -> Tensor:
    _share(fwd, layer, k, v)
    hidden, sink = fwd.hidden(layer), fwd.plan.window.sink if fwd.plan.window else 0
    first = _first(fwd, k.shape[2])
    if sliding is not None:
        hidden, sink = functools.partial(_outside, sliding), 0
    elif fwd.cache is not None and isinstance(fwd.cache.layers[layer], KVLayer):
        store = fwd.cache.layers[layer].store
        first = store.first or first
        if isinstance(fwd.plan.selector, Evictor):
            fwd.plan.selector.watch(q, k, first, scale, store.notes)
    kernel = getattr(kernels.get(fwd.backend, q.device), "prefill_window", prefill_window)
    out, pairs = kernel(q, k, v, first, scale, hidden, sink)
    total = fwd.past + fwd.tokens
    dense = sum(causal_pairs(fwd.past - pad, total - pad, sliding) for pad in fwd.rows.pad)
    if sliding is not None:  # counted as dense counts them: what the blocks add is no choice of the method
        pairs = sum(causal_pairs(total - q.shape[2] - pad, total - pad, sliding) for pad in fwd.rows.pad)
    fwd.books.attended(pairs, dense, q.shape[1], q.shape[3])
    return out


def _outside(window: int, tokens: int) -> int:
    """Return the keys that a sliding window of this size hides from a query that sees `tokens` keys."""
    return max(0, tokens - window)


def _share(fwd: Forward, layer: int, k: Tensor, v: Tensor) -> None:
    """Overwrite the keys and values of rows that are frozen further than the batch's shortest prefix (kv="share")."""
    for row, end in enumerate(fwd.shared_until.get(layer, ())):
        below = fwd.cache.layers[layer - 1].store.views()
        k[row, :, fwd.past : end] = below[0][row, :, fwd.past : end]
        v[row, :, fwd.past : end] = below[1][row, :, fwd.past : end]


def _traced(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, sliding: int | None, hidden: Tensor | None
) -> Tensor:
    """Leave one call in the graph of a compiled decode step; `compiled` says what it does when the graph runs."""
    out: Tensor = torch.ops.prehoc.decode_layer(q, k, v, module.layer_idx, scale, sliding, hidden)  # [B, H, Dv]
    return out[:, None]


def decode_layer(
    fwd: Forward,
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    sliding: int | None,
    hidden: Tensor | None = None,
) -> Tensor:
    """Return the attention output ``[B, H, 1, Dv]`` of a layer's decode step.

    q is ``[B, H, 1, D]``, k and v are as cached, and `hidden` is `Step.hidden` where the plan asks for it.
    """
    holder = fwd.cache.layers[layer]
    one = q[:, :, 0].detach().contiguous()  # [B, H, D]
    ops = kernels.get(fwd.backend, q.device)
    if sliding is not None or not isinstance(holder, KVLayer):
        k, v = (k, v) if sliding is None else (k[:, :, -sliding:], v[:, :, -sliding:])
        first = _first(fwd, k.shape[2])
        fwd.books.sliding(k, v.shape[-1], first)
        out: Tensor = ops.decode_dense(one, k, v, first, 0, first, scale)
        return out[:, :, None]
    if fwd.stopwatch:
        fwd.stopwatch.lap("rest")
    masked = fwd.masked(layer)
    hidden = None if hidden is None else hidden.detach()
    step = Step(layer, one, k, v, scale, fwd.rows, masked, fwd.backend, hidden=hidden)
    step, decision = _decide(fwd, holder, step)
    if fwd.stopwatch:
        fwd.stopwatch.lap("selection")
    fwd.books.decision(step, v.shape[-1], decision)
    if fwd.recorder is not None:
        fwd.recorder.record(step, v, decision)
    if fwd.auditor is not None:
        fwd.auditor.sample(step, decision, fwd.books)
    if fwd.stopwatch:
        fwd.stopwatch.lap("rest")
    made = decision.out
    out = fwd.attend(ops, step, None if fwd.observe else decision.selection) if made is None else made
    if fwd.stopwatch:
        fwd.stopwatch.lap("attention")
    return out[:, :, None]


def _decide(fwd: Forward, holder: KVLayer, step: Step) -> tuple[Step, Decision]:
    """Return the plan's decision, and the step as it finds the cache when keys were evicted."""
    store, selector = holder.store, fwd.plan.selector
    if isinstance(selector, Evictor):
        if fwd.recorder is None and not fwd.observe:
            step, decision, _ = selector.run(store, step)
            holder._refresh()
            return step, decision
        state = store.selection_state(selector)  # a recorder needs every key: the eviction happens to a copy
        state["notes"] = store.notes
        return step, decide(fwd.plan, step, state)
    if store.first is None:
        if getattr(selector, "across_layers", False):
            step.peers = {i: x.store.state for i, x in enumerate(fwd.cache.layers) if isinstance(x, KVLayer)}
        # backends keep different things: native kernels do not go on with the copies that the torch ones read
        held = store.selection_state((selector, fwd.backend)) if selector else None
        return step, decide(fwd.plan, step, held)
    if not fwd.plan.dense:
        raise ValueError(
            "keys of this cache were evicted by another method and the others have changed places: only method dense and "
            "methods that evict can go on with it"
        )
    rows = zip(step.rows.pad, store.first, strict=True)
    gone = tuple(store.dropped + begin - pad for pad, begin in rows)
    step = dataclasses.replace(step, rows=dataclasses.replace(step.rows, pad=store.first))
    return step, Decision(None, counted=tuple(many > 0 for many in gone), evicted=gone)
