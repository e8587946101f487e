"""The cache layer that transformers sees, and the adoption of a user's cache."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from prehoc.cache import KVStore
from prehoc.integrations.transformers.compat import removed_tokens


class KVLayer(CacheLayerMixin):
    """A full-attention cache layer over a preallocated `KVStore`."""

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, capacity: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.store = KVStore()
        self.capacity = capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Mark the layer as in use; memory comes with the first update."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append ``[B, Hkv, T, D]`` keys and values and return views of all."""
        self.is_initialized = True
        self.keys, self.values = self.store.append(key_states, value_states, self.capacity)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the key length and offset of a mask for `query_length` new tokens."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return the columns of the text, those included whose keys were evicted."""
        return self.store.length + self.store.dropped

    def get_max_length(self) -> int:
        """Return -1: the layer grows."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.store.reset()
        self.keys = self.values = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens."""
        self.store.crop(removed_tokens(tokens_to_remove, self.get_seq_length()))
        self._refresh()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows, selection state included."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at `indices`."""
        if self.store.length:
            self.store.take(indices)
            self._refresh()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        if self.store.length:
            self.batch_select_indices(torch.arange(len(self.store.rows.pad)).repeat_interleave(repeats))

    def _refresh(self) -> None:
        self.keys, self.values = self.store.views() if self.store.length else (None, None)


def new_cache(config: Any, capacity: int = 0) -> Any:
    """Return an empty cache for a model's config, with `capacity` columns reserved in its full-attention layers."""
    return adopt(DynamicCache(config=config.get_text_config(decoder=True)), config, capacity)


def check_cache(cache: Any) -> None:
    """Raise ValueError, with the reason, for a cache that is not a plain dynamic one."""
    if not isinstance(cache, DynamicCache) or getattr(cache, "offloading", False):
        kind = "an offloaded cache" if getattr(cache, "offloading", False) else type(cache).__name__
        raise ValueError(
            f"{kind} is not supported: prehoc keeps keys and values in its own preallocated layers; "
            "pass a plain DynamicCache, or none"
        )


def adopt(cache: Any, config: Any, capacity: int = 0) -> Any:
    """Replace the full-attention layers of a dynamic cache in place; what they hold is copied once.

    Raises
    ------
    ValueError
        For any other kind of cache, named with its reason.
    """
    check_cache(cache)
    if not cache.layers:
        cache.layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
        cache.layer_class_to_replicate = None
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            ours = KVLayer(capacity)
            if layer.keys is not None and layer.values is not None and layer.get_seq_length():
                ours.update(layer.keys, layer.values)
            cache.layers[i] = ours
        elif isinstance(layer, KVLayer):
            layer.capacity = max(layer.capacity, capacity)
        elif type(layer) is not DynamicSlidingWindowLayer:
            raise ValueError(
                f"cache layer {i} is a {type(layer).__name__}: prehoc supports full and sliding-window layers"
            )
    return cache


def fork(cache: Cache) -> DynamicCache:
    """Return an independent copy of a prehoc cache: prefill once, decode with several methods."""
    twin = DynamicCache()
    twin.layers, twin.layer_class_to_replicate = [], None
    for layer in cache.layers:
        if isinstance(layer, KVLayer):
            ours = KVLayer(layer.capacity)
            ours.store, ours.is_initialized = layer.store.copy(), layer.is_initialized
            ours._refresh()
            twin.layers.append(ours)
        else:
            twin.layers.append(copy.deepcopy(layer))
    return twin
