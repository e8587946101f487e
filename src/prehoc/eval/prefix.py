"""The dense part that all prefill settings share: computed once per batch of prompts, then replayed."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from prehoc.integrations.transformers.compat import cache_key
from prehoc.integrations.transformers.forward import Forward
from prehoc.integrations.transformers.layers import KVLayer
from prehoc.integrations.transformers.session import sparsify
from prehoc.integrations.transformers.support import find_base
from prehoc.kernels.prefill import causal_pairs

_PREFIX = "_prehoc_dense_prefix"


class DensePrefix:
    """Keys, values and hidden states that a dense prefill left in the layers up to a method's start layer.

    PSAW and ETF leave every layer up to and including their start layer as it is, so a sweep over their settings would
    repeat the same dense layers for each. `recording` keeps them from one dense prefill; `replaying` puts them in the
    place of those layers, and enters the work they stand for in the session's books, so that a report is the same as
    without. Decode steps are never replayed.

    Parameters
    ----------
    model : Module
        A model that `prehoc.attach` takes.
    starts : iterable of int
        Layers whose output is kept: the start layers of the settings to come.
    """

    def __init__(self, model: nn.Module, starts: Iterable[int]) -> None:
        found = find_base(model)
        if found is None:
            raise ValueError(f"unsupported model: {type(model).__name__} has no decoder layers that prehoc knows")
        self._layers = found[1]
        self._heads = int(model.config.get_text_config(decoder=True).num_attention_heads)  # type: ignore[union-attr, operator]
        self._starts = sorted({start for start in starts if start < len(self._layers)})
        self._hidden: dict[int, Tensor] = {}
        self._cached: list[tuple[Tensor, Tensor]] = []

    @property
    def ready(self) -> bool:
        """Whether a dense prefill was kept."""
        return bool(self._hidden)

    @torch.no_grad()
    def compute(self, model: nn.Module, prompt: Tensor) -> None:
        """Run one dense prefill of int64 ``[B, T]`` tokens and keep it."""
        base: Any = find_base(model)[0]  # type: ignore[index]  # the constructor found it
        with self.recording(), sparsify(model, "dense") as session:
            base(input_ids=prompt, use_cache=True, **{cache_key({}, base): session.new_cache(prompt.shape[1])})

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what the first forward inside the block, a dense prefill, computes."""
        with contextlib.ExitStack() as undo:
            for start in self._starts:
                undo.callback(self._layers[start].register_forward_hook(self._keep, with_kwargs=True).remove)
            yield

    def _keep(self, layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> None:
        fwd: Forward = kwargs["prehoc"]
        start = int(layer.self_attn.layer_idx)  # type: ignore[union-attr, arg-type]
        if fwd.past or start in self._hidden:
            return
        if not all(isinstance(holder, KVLayer) for holder in fwd.cache.layers):
            return  # a sliding layer keeps only its window: such models run every setting in full
        self._hidden[start] = output
        if start == self._starts[-1]:
            views = (holder.store.views() for holder in fwd.cache.layers[: start + 1])
            self._cached = [(k.clone(), v.clone()) for k, v in views]

    @contextlib.contextmanager
    def replaying(self, start: int) -> Iterator[None]:
        """Put what was kept in place of layers 0 to `start`; where nothing was kept, the layers run as ever.

        Enter it before the session begins, and leave it after its end.
        """
        if start not in self._hidden or not self._cached:
            yield
            return
        layers = list(self._layers)[: start + 1]
        try:
            for i, layer in enumerate(layers):
                setattr(layer, _PREFIX, (*self._cached[i], self._hidden[start] if i == start else None, self._heads))
                layer.forward = types.MethodType(_replay, layer)
            yield
        finally:
            for layer in layers:
                del layer.forward
                delattr(layer, _PREFIX)


def _replay(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    fwd: Forward = kwargs["prehoc"]
    if fwd.phase != "prefill":
        return types.MethodType(type(self).forward, self)(hidden_states, *args, **kwargs)
    k, v, output, heads = getattr(self, _PREFIX)
    fwd.cache.layers[int(self.self_attn.layer_idx)].update(k, v)  # type: ignore[union-attr, arg-type]
    pairs = causal_pairs(0, fwd.tokens) * k.shape[0]
    fwd.books.attended(pairs, pairs, heads, k.shape[-1])
    return hidden_states if output is None else output
