"""The only module that knows what differs between the supported transformers releases (5.16 to 5.24)."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import transformers
from packaging.version import Version

OLDEST = "5.16"


@functools.cache
def check_version() -> None:
    """Raise ValueError when the installed transformers is older than what prehoc needs."""
    if Version(transformers.__version__) < Version(OLDEST):
        raise ValueError(
            f"prehoc needs transformers >= {OLDEST} (found {transformers.__version__}); "
            "upgrade with: pip install --upgrade transformers"
        )


def cache_key(kwargs: dict[str, Any], module: Any = None) -> str:
    """Return the name of the cache argument: ``cache`` from 5.24 on, ``past_key_values`` before."""
    if kwargs.get("cache") is not None:
        return "cache"
    if kwargs.get("past_key_values") is not None:
        return "past_key_values"
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def output_cache(output: Any) -> Any:
    """Return the cache of a model output under either of its names."""
    return output.cache if hasattr(output, "cache") else output.past_key_values


def removed_tokens(argument: int, length: int) -> int:
    """Return how many tokens a call of ``crop(argument)`` removes: negative counts, or the older absolute length."""
    return -argument if argument <= 0 else max(length - argument, 0)
