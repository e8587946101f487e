"""The ``generate()`` of an attached model: checks first, declares the prompt, then runs the model's own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from prehoc.integrations.transformers.forward import Declared, declared, left_padding
from prehoc.integrations.transformers.layers import check_cache

_ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")


def generate(self: Any, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """Run the model's own ``generate`` under its prehoc session.

    Raises
    ------
    ValueError
        Before any work: empty prompt, more tokens than the model has positions, a cache or decoding mode that cannot run.
    """
    session = self._prehoc_session
    prompt = next((x for x in (kwargs.get("inputs_embeds"), inputs, kwargs.get("input_ids")) if x is not None), None)
    config = args[0] if args else kwargs.get("generation_config")
    config = self.generation_config if config is None else config
    if prompt is None or prompt.shape[1] == 0:
        raise ValueError("the prompt is empty: give at least one token")
    tokens = int(prompt.shape[1])
    new = _new_tokens(config, kwargs, tokens)
    _refuse(session.plan.dense, session.plan.selector is not None, config, kwargs)
    limit = getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and tokens + new > limit:
        raise ValueError(
            f"{tokens} prompt tokens + {new} new ones exceed the model's {limit} positions; shorten the prompt or set "
            f"max_new_tokens to at most {max(limit - tokens, 0)}"
        )
    mask = kwargs.get("attention_mask")
    pad = left_padding(mask, mask.shape[0]) if isinstance(mask, Tensor) and mask.dim() == 2 else None
    for row, columns in enumerate(pad or ()):
        if columns >= tokens:
            raise ValueError(f"row {row} of the batch is empty: its attention mask leaves no real token; drop the row")
    cache = next((c for c in (kwargs.get("cache"), kwargs.get("past_key_values")) if c is not None), None)
    if cache is not None:
        check_cache(cache)
    first_turn = cache is None or cache.get_seq_length() == 0
    token = declared.set(Declared(tokens, pad, tokens + new, first_turn))
    try:
        own = session.own_generate
        if inputs is None:
            return own(*args, **kwargs)
        return own(inputs, *args, **kwargs)
    finally:
        declared.reset(token)


def _new_tokens(config: Any, kwargs: dict[str, Any], tokens: int) -> int:
    new = kwargs.get("max_new_tokens", getattr(config, "max_new_tokens", None))
    if new is not None:
        return int(new)
    longest = kwargs.get("max_length", getattr(config, "max_length", None))
    return max(int(longest) - tokens, 0) if longest is not None else 20  # transformers' own default


def _refuse(dense: bool, selects: bool, config: Any, kwargs: dict[str, Any]) -> None:
    def asked(name: str) -> Any:
        return kwargs.get(name, getattr(config, name, None))

    if not dense and any(asked(name) is not None for name in _ASSISTED):
        raise ValueError(
            "assisted decoding verifies several tokens in one forward, which would silently be dense; "
            "use method dense, or leave assistant_model and prompt_lookup_num_tokens out"
        )
    if asked("cache_implementation") not in (None, "dynamic", "dynamic_full"):
        raise ValueError(
            f"cache_implementation={asked('cache_implementation')!r} is not supported: prehoc keeps keys and values in its own "
            "preallocated layers; leave it out"
        )
    if selects and asked("use_cache") is False:
        raise ValueError(
            "use_cache=False recomputes the whole text at every step: there is no decode to select in; set it to True"
        )
    if asked("output_attentions"):
        raise ValueError("output_attentions=True is not available: prehoc never materialises attention weights")
