"""Calibration of Double Sparsity: which channels carry q.k, measured on a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from prehoc.trace import trace


def channel_order(
    model: nn.Module,
    token_ids: Sequence[int] | Tensor,
    prompt_tokens: int,
    steps: int,
    *,
    backend: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> NDArray[np.int64]:
    """Return each KV head's channels by falling mean of ``|q_c k_c|`` over a text, dense throughout.

    Parameters
    ----------
    model : Module
        A supported transformers model in eval mode.
    token_ids : sequence of int or Tensor
        At least P + S tokens.
    prompt_tokens, steps : int
        P and S: the queries are those of the last S tokens, the keys those of all.
    backend : str, optional
        Kernel backend.
    progress : callable, optional
        Called as ``progress(stage, done, total)``.

    Returns
    -------
    ndarray
        int64 ``[N, Hkv, D]``; sliding layers, which select nothing, keep the order they have.

    Raises
    ------
    ValueError
        As `prehoc.trace.trace`.
    """
    found = trace(
        model,
        token_ids,
        prompt_tokens,
        steps,
        "dense",
        observe=True,
        record=("qk",),
        backend=backend,
        progress=progress,
    )
    assert found.q is not None and found.k is not None
    n, hkv, _, d = found.k.shape
    # the mean over all pairs of |q_c| |k_c| is the product of the means
    queries = np.abs(found.q).mean(0).reshape(n, hkv, -1, d).mean(2)
    order = np.argsort(-queries * np.abs(found.k).mean(2), axis=-1, kind="stable")
    order[found.meta["sliding_layers"]] = np.arange(d)
    return order
