"""Perplexity of text windows under a method: of the window itself, and of a continuation behind a pruned prompt."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prehoc.eval.prefix import DensePrefix
from prehoc.integrations.transformers.compat import cache_key
from prehoc.integrations.transformers.session import sparsify
from prehoc.integrations.transformers.support import find_base
from prehoc.methods import parse_method
from prehoc.selection import Method
from prehoc.trace import position_limit

HEAD_ROWS = 256
"""Hidden rows whose logits exist at the same time: 256 rows of 49,152 logits are 50 MB in float32."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Negative log likelihoods of a batch of windows, in nats per token, and the work of their prompts.

    Attributes
    ----------
    window_nll : tuple of float or None
        Per window, mean over all its tokens but the first; None when the method freezes tokens, whose logits mean nothing.
    continuation_nll : tuple of float
        Per window, mean over the tokens of the continuation.
    operations, operations_dense : int
        Prefill operations of the batch, done and dense (from the session's books).
    seconds : float
        Wall time.
    """

    window_nll: tuple[float, ...] | None
    continuation_nll: tuple[float, ...]
    operations: int
    operations_dense: int
    seconds: float


@torch.no_grad()
def measure(
    model: nn.Module,
    method: Method | str,
    windows: Tensor,
    continuation: int,
    *,
    block: int = 1,
    backend: str | None = None,
    prefix: DensePrefix | None = None,
    step: Callable[[int, int], None] | None = None,
) -> Measured:
    """Read windows under a method: prompt in one prefill, then the continuation decoded with its own tokens.

    PSAW hides the same keys from a query whether it is prefilled or decoded, so the prompt's logits and the decoded ones
    together are those of the window itself.

    Parameters
    ----------
    model : Module
        A causal language model in evaluation mode.
    method : Method or str
        As for `prehoc.sparsify`.
    windows : Tensor
        int64 ``[B, W]``, tokens of equal length without padding.
    continuation : int
        Last tokens of each window that are decoded, 1 to W - 2.
    block : int
        Tokens decoded by one forward. The tokens are known beforehand, so that a block sees what its tokens would see one by
        one: the same numbers up to rounding, in a fraction of the time. Methods that select in decode need 1.
    backend : str, optional
        As for `prehoc.sparsify`.
    prefix : DensePrefix, optional
        Recorded by the dense method, replayed by any other.
    step : callable, optional
        Called with (steps done, all steps); the prefill is one step.

    Returns
    -------
    Measured

    Raises
    ------
    ValueError
        When windows and continuation do not fit each other or the model's positions, or the method needs block=1.
    """
    rows, length = windows.shape
    check_lengths(position_limit(model.config), length, continuation)
    chosen = parse_method(method) if isinstance(method, str) else method
    if block > 1 and chosen.plan().selector is not None:
        raise ValueError(f"block={block}: {chosen.name} selects at every decode step; set block to 1")
    began, prompt = time.perf_counter(), length - continuation
    tick = step or (lambda done, total: None)
    base, head = base_and_head(model, windows[:1, :2])
    with contextlib.ExitStack() as stack:
        if prefix is not None:
            stack.enter_context(_shared(prefix, model, chosen))
        session = stack.enter_context(sparsify(model, chosen, backend=backend, audit=0.0))
        cache = {cache_key({}, base): session.new_cache(length), "use_cache": True}
        hidden = base(input_ids=windows[:, :prompt], **cache).last_hidden_state  # [B, prompt, C]
        frozen = session.plan.freeze is not None
        first = prompt - 1 if frozen else 0
        losses = [token_nll(head, hidden[:, first:], windows[:, first + 1 : prompt + 1])]
        del hidden
        work = session.report().prefill
        if block > 1:
            stack.callback(base.register_forward_pre_hook(_as_decode, with_kwargs=True).remove)
        for column in range(prompt, length - 1, block):
            tick(column - prompt + 1, continuation)
            end = min(column + block, length - 1)
            last = base(input_ids=windows[:, column:end], **cache).last_hidden_state
            losses.append(token_nll(head, last, windows[:, column + 1 : end + 1]))
        tick(continuation, continuation)
    nll = torch.cat(losses, 1).double().cpu()  # [B, length - 1], or the continuation's alone
    return Measured(
        None if frozen else tuple(nll.mean(1).tolist()),
        tuple(nll[:, -continuation:].mean(1).tolist()),
        work.operations,
        work.operations_dense,
        time.perf_counter() - began,
    )


def _as_decode(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Tell the layers that several new tokens are decoded, not a later turn: the depth window stays in force."""
    kwargs["prehoc"].phase = "decode"


def check_lengths(limit: int | None, window: int, continuation: int) -> None:
    """Raise ValueError unless a window fits a model of `limit` positions and leaves a prompt of at least two tokens."""
    if limit is not None and window > limit:
        raise ValueError(f"window={window} exceeds the model's {limit} positions; give a window of at most {limit}")
    if continuation < 1:
        raise ValueError(f"continuation={continuation} must be at least 1")
    if window - continuation < 2:
        raise ValueError(
            f"continuation={continuation} leaves no prompt in a window of {window}; give at most {max(window - 2, 1)}"
        )


def start_layer(model: nn.Module, method: Method) -> int | None:
    """Return the last layer that a method's prefill leaves as it is (None: it changes nothing)."""
    from prehoc.methods.psaw import resolve_start_layer

    layers = len(find_base(model)[1])  # type: ignore[index]
    plan = method.plan()
    starts = [resolve_start_layer(part.start_layer, layers) for part in (plan.window, plan.freeze) if part is not None]
    return min(min(starts), layers - 1) if starts else None


def _shared(prefix: DensePrefix, model: nn.Module, method: Method) -> Any:
    start = start_layer(model, method)
    return prefix.recording() if start is None else prefix.replaying(start)


def base_and_head(model: Any, tokens: Tensor) -> tuple[Any, nn.Module]:
    """Return the decoder and the output projection, after a check on two tokens that the latter alone makes the logits."""
    found = find_base(model)
    if found is None:
        raise ValueError(f"unsupported model: {type(model).__name__} has no decoder layers that prehoc knows")
    base, head = found[0], model.get_output_embeddings()
    ours = head(base(input_ids=tokens, use_cache=False).last_hidden_state)
    theirs = model(input_ids=tokens, use_cache=False).logits
    if not torch.allclose(ours.float(), theirs.float(), rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"{type(model).__name__} does more to its logits than one projection (scaling or capping): perplexity is not "
            "implemented for it"
        )
    return base, head


def token_nll(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return float32 ``[B, T]``, minus the log probability of each target; logits exist for few rows at a time."""
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    parts = [
        F.cross_entropy(head(rows).float(), want, reduction="none")
        for rows, want in zip(flat.split(HEAD_ROWS), wanted.split(HEAD_ROWS), strict=True)
    ]
    return torch.cat(parts).view(targets.shape)


@dataclasses.dataclass(frozen=True)
class Change:
    """Relative change of perplexity against dense, paired by window: mean and ends of the 95 % interval."""

    mean: float
    low: float
    high: float


def paired_change(nll: Sequence[float], dense: Sequence[float]) -> Change:
    """Return the relative change of perplexity with its 95 % interval, by the paired t method.

    With d the differences of mean NLL per window, mean(d) +- t(0.975, n - 1) s(d) / sqrt(n) is the interval of the mean
    difference; exp(x) - 1 of each is the relative change of perplexity. All windows have equally many tokens.

    Parameters
    ----------
    nll, dense : sequence of float
        Mean NLL per window in nats, in the same order.

    Returns
    -------
    Change
        An infinite interval for a single window.

    Raises
    ------
    ValueError
        When the two do not pair up.
    """
    if len(nll) != len(dense) or not nll:
        raise ValueError(f"{len(nll)} windows do not pair up with {len(dense)} dense ones")
    d = [a - b for a, b in zip(nll, dense, strict=True)]
    mean = statistics.fmean(d)
    if len(d) == 1:
        return Change(math.expm1(mean), -1.0, math.inf)
    half = t_quantile(len(d) - 1) * statistics.stdev(d) / math.sqrt(len(d))
    return Change(math.expm1(mean), math.expm1(mean - half), math.expm1(mean + half))


def t_quantile(freedom: int, upper: float = 0.975) -> float:
    """Return the quantile of Student's t distribution with `freedom` degrees of freedom (Simpson's rule and bisection)."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

    def below(x: float, pieces: int = 2000) -> float:
        h = x / pieces
        y: list[float] = [scale * (1 + (i * h) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(pieces + 1)]
        return 0.5 + h / 3 * (y[0] + y[-1] + 4 * sum(y[1:-1:2]) + 2 * sum(y[2:-1:2]))

    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < upper else (low, middle)
    return (low + high) / 2
