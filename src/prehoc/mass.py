"""Attention mass that a selection keeps and leaves out, and what follows from it; proofs in ``docs/theory.md``.

Three words are kept apart. A *bound* (functions with ``_bound`` in their name) holds for every input in exact
arithmetic. An *audit* is a full scoring of some decode triples; `mean_interval` puts an interval on its mean. An
*estimate* may be wrong in either direction; nothing in this module is one. Entropies and information are in nats.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

_BOOTSTRAP_CHUNK = 1 << 22  # resampled values held at once: 32 MiB of float64


def attention_weights(q: Tensor, k: Tensor, scale: float, visible: Tensor | None = None) -> Tensor:
    """Compute softmax(scale * q.k) of one query per head over all its keys, the reference every mass is taken from.

    Parameters
    ----------
    q : Tensor
        ``[B, H, D]`` queries (after the positional rotation), any floating dtype.
    k : Tensor
        ``[B, Hkv, L, D]`` keys; query head h reads KV head ``h // (H // Hkv)``.
    scale : float
        Factor on the dot product, usually ``D ** -0.5``.
    visible : Tensor, optional
        bool ``[B, L]``, False for padding and masked keys.

    Returns
    -------
    Tensor
        ``[B, H, L]``, float32 (float64 for float64 input). A row that sees no key is all zeros.

    Raises
    ------
    ValueError
        When the shapes do not fit each other.
    """
    if q.ndim != 3 or k.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[3]:
        raise ValueError(f"q {list(q.shape)} and k {list(k.shape)} do not fit; pass q [B, H, D] and k [B, Hkv, L, D]")
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads % kv_heads:
        raise ValueError(
            f"{heads} query heads are no multiple of {kv_heads} KV heads; pass k with a divisor of {heads}"
        )
    grouped = _upcast(q).reshape(q.shape[0], kv_heads, heads // kv_heads, q.shape[2])
    logits = (torch.matmul(grouped, _upcast(k).transpose(-1, -2)) * scale).flatten(1, 2)
    if visible is None:
        return logits.softmax(-1)
    if visible.shape != (k.shape[0], k.shape[2]) or visible.dtype != torch.bool:
        raise ValueError(f"visible is {visible.dtype} {list(visible.shape)}; pass bool {[k.shape[0], k.shape[2]]}")
    weights = logits.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    return weights.masked_fill(~visible.any(-1)[:, None, None], 0.0)  # else softmax over nothing is NaN


def retained_mass(weights: Tensor, indices: Tensor) -> Tensor:
    """Sum the attention weights of the selected keys, per query head.

    Parameters
    ----------
    weights : Tensor
        ``[B, H, L]`` attention weights (`attention_weights`).
    indices : Tensor
        int32 or int64 ``[B, Hs, Kmax]`` selected keys, padded with -1; Hs is H or a divisor of it (Hkv).

    Returns
    -------
    Tensor
        ``[B, H]``, float32 or float64, in [0, 1] up to rounding.

    Raises
    ------
    ValueError
        When shapes or dtypes do not fit, or (checked on the CPU only) an index lies outside [-1, L).
    """
    return _upcast(weights).masked_fill(~_selected(weights, indices), 0.0).sum(-1)


def dropped_mass(weights: Tensor, indices: Tensor) -> Tensor:
    """Sum the attention weights of the keys left out, per query head: delta.

    The left-out weights are added up, not subtracted from one, so a delta far below the rounding of 1 is still right.
    Shapes, dtypes and errors are those of `retained_mass`.
    """
    return _upcast(weights).masked_fill(_selected(weights, indices), 0.0).sum(-1)


def truncated_weights(weights: Tensor, indices: Tensor) -> Tensor:
    """Return the distribution really attended: weights outside the selection zeroed, the rest scaled to sum to one.

    Returns ``[B, H, L]``; a row whose selection holds no mass at all is NaN, it has no such distribution.
    Arguments and errors are those of `retained_mass`.
    """
    kept = _upcast(weights).masked_fill(~_selected(weights, indices), 0.0)
    return kept / kept.sum(-1, keepdim=True)


def total_variation(weights: Tensor, indices: Tensor) -> Tensor:
    """Total variation between full attention and attention over the selection: exactly the dropped mass.

    An identity, not a bound (``docs/theory.md``, proposition 1): half the L1 distance between `weights` and
    `truncated_weights`. Shapes, dtypes and errors are those of `retained_mass`.
    """
    return dropped_mass(weights, indices)


def vector_radius(vectors: Tensor, centre: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
    """Return max ||x - c|| over the visible keys or values of a KV head.

    Every bound here holds for any fixed c, so the smallest radius is wanted. The mean (default) is cheap and at most
    twice as far as the best centre; ``torch.zeros(())`` gives the largest norm (the K_max of the published form).

    Parameters
    ----------
    vectors : Tensor
        ``[B, Hkv, L, D]`` keys or values, any floating dtype.
    centre : Tensor, optional
        c, broadcastable to ``[B, Hkv, D]``; default the mean over the visible vectors.
    visible : Tensor, optional
        bool ``[B, L]``.

    Returns
    -------
    Tensor
        ``[B, Hkv]``, float32 or float64; 0 for a row that sees nothing.

    Raises
    ------
    ValueError
        When the shapes do not fit.
    """
    shape = list(vectors.shape)
    if len(shape) != 4 or (visible is not None and list(visible.shape) != [shape[0], shape[2]]):
        seen_shape = None if visible is None else list(visible.shape)
        raise ValueError(
            f"vectors {shape}, visible {seen_shape}: pass vectors [B, Hkv, L, D] and visible [B, L] or None"
        )
    x = _upcast(vectors)
    seen = torch.ones_like(x[..., 0], dtype=torch.bool) if visible is None else visible[:, None].expand(x.shape[:-1])
    if centre is None:
        count = seen.sum(-1, keepdim=True).clamp(min=1)
        centre = x.masked_fill(~seen[..., None], 0.0).sum(-2) / count
    offset = x - centre.to(x).expand(*x.shape[:2], x.shape[-1])[..., None, :]
    distance: Tensor = torch.linalg.vector_norm(offset, dim=-1)
    return distance.masked_fill(~seen, 0.0).amax(-1)


def output_error_bound(dropped: Tensor, value_radius: Tensor) -> Tensor:
    """Bound the L2 change of a head's output by 2 * delta * max||v - c|| (``docs/theory.md``, proposition 2).

    Parameters
    ----------
    dropped : Tensor
        ``[B, H]`` dropped mass.
    value_radius : Tensor
        ``[B, Hkv]`` from `vector_radius` of the values.

    Returns
    -------
    Tensor
        ``[B, H]`` in units of the values, before the output projection.
    """
    return _upcast(dropped) * _per_query_head(value_radius, dropped.shape[-1]) * 2.0


def entropy(p: Tensor) -> Tensor:
    """Entropy in nats over the last axis: ``[..., n]`` probabilities to float64 ``[...]``, with 0 log 0 = 0."""
    return -torch.xlogy(p.double(), p.double()).sum(-1)


def binary_entropy(x: Tensor | float) -> Tensor:
    """Entropy in nats of a coin with probability x in [0, 1], float64, of x's shape."""
    x = torch.as_tensor(x, dtype=torch.float64)
    return -torch.xlogy(x, x) - (1.0 - x) * torch.log1p(-x.clamp(max=1.0 - 2.0**-53))  # finite at 1, where h is 0


def routing_information(weights: Tensor) -> Tensor:
    """Mutual information between a uniformly drawn step and the key its query attends: H(mean A) - mean H(A), nats.

    Parameters
    ----------
    weights : Tensor
        ``[..., steps, n]`` distributions, n the keys visible at the last step; earlier rows padded with zeros.

    Returns
    -------
    Tensor
        float64 ``[...]``, in [0, min(log steps, log n)].

    Raises
    ------
    ValueError
        When a row does not sum to one within 1e-3.
    """
    a = weights.double()
    off = float((a.sum(-1) - 1.0).abs().max())
    if not off <= 1e-3:  # also true for NaN
        raise ValueError(
            f"a row of weights is {off:g} away from summing to one; pass distributions (truncated_weights)"
        )
    return (entropy(a.mean(-2)) - entropy(a).mean(-1)).clamp(min=0.0)  # negative by rounding only


def information_bound(dropped: Tensor | float, n: int, steps: int) -> Tensor:
    """Bound |I_full - I_S| by 2 (delta log(n - 1) + h(delta)), clipped at min(log steps, log n), in nats.

    Continuity of entropy under total variation, and concavity (``docs/theory.md``, proposition 3). Above
    delta = 1 - 1/n the unclipped expression would fall again; there its largest value log n takes its place, and the
    clip decides.

    Parameters
    ----------
    dropped : Tensor or float
        Mean dropped mass over the steps, in [0, 1], any shape.
    n : int
        Keys visible at the last step.
    steps : int
        Number of steps.

    Returns
    -------
    Tensor
        float64, of `dropped`'s shape.

    Raises
    ------
    ValueError
        When a dropped mass is outside [0, 1], or n or steps is below 1.
    """
    x, ceiling = _information_arguments(dropped, n, steps)
    x = x.clamp(max=1.0 - 1.0 / n)
    return ((x * math.log(max(n - 1, 1)) + binary_entropy(x)) * 2.0).clamp(max=ceiling)


def information_bound_steps(dropped: Tensor | float, n: int, steps: int) -> Tensor:
    """Bound |I_full - I_S| by delta log(steps) + h(delta), clipped like `information_bound`; sharper for few steps.

    The same information read from the other side, as what the attended key tells about the step (``docs/theory.md``,
    proposition 4). Arguments, result and errors are those of `information_bound`; both hold, so their minimum does.
    """
    x, ceiling = _information_arguments(dropped, n, steps)
    return (x * math.log(steps) + binary_entropy(x)).clamp(max=ceiling)


def lipschitz_bound(q1: Tensor, q2: Tensor, k_max_norm: Tensor, scale: float) -> Tensor:
    """Bound ||A(q2) - A(q1)||_1 over the same keys by scale * K_max * ||q2 - q1|| (``docs/theory.md``, proposition 5).

    Parameters
    ----------
    q1, q2 : Tensor
        ``[B, H, D]`` queries.
    k_max_norm : Tensor
        ``[B, Hkv]`` largest key norm, or any `vector_radius` of the keys: the softmax does not see a common shift, so
        max||k - c|| holds with the same constant.
    scale : float
        Factor on the dot product.

    Returns
    -------
    Tensor
        ``[B, H]``, float32 or float64. An L1 distance never exceeds 2: larger values say nothing.

    Raises
    ------
    ValueError
        When the two queries differ in shape, or the head counts do not divide.
    """
    if q1.ndim != 3 or q1.shape != q2.shape:
        raise ValueError(f"q1 {list(q1.shape)} and q2 {list(q2.shape)} differ; pass two queries [B, H, D] of one shape")
    distance: Tensor = torch.linalg.vector_norm(_upcast(q2) - _upcast(q1), dim=-1)
    return _per_query_head(k_max_norm, q1.shape[1]) * distance * abs(scale)


def attention_change_bound(q1: Tensor, q2: Tensor, key_radius: Tensor, scale: float) -> Tensor:
    """Bound ||A(q2) - A(q1)||_1 by 2 tanh(L / 2), L the `lipschitz_bound`: never above L, never above 2."""
    return torch.tanh(lipschitz_bound(q1, q2, key_radius, scale) * 0.5) * 2.0


def shared_loss_bound(change: Tensor, middle_mass: Tensor | float = 1.0, anchor_gap: Tensor | float = 0.0) -> Tensor:
    """Bound what a shared set loses: oracle retained mass minus its own, at most middle_mass * (change + anchor_gap).

    Holds per query head for a shared set that contains the anchor's k keys of the middle, with the window frozen at the
    anchor, against any set of sinks, sliding window and at most k keys of today's middle; keys appended since the
    anchor are covered. Not for ``matched`` (fewer than k keys) nor PSAW (shorter middle). ``docs/theory.md``,
    proposition 6.

    Parameters
    ----------
    change : Tensor
        ``[...]`` bound on (or the true) ||B(q) - B(anchor)||_1, B the attention over the anchor's middle alone. Bounds
        from `lipschitz_bound` over any set of keys that contains the middle are valid.
    middle_mass : Tensor or float
        Today's attention mass of the anchor's middle, a number in [0, 1]; 1 when it is not known.
    anchor_gap : Tensor or float
        At the anchor, mass under B of the best k keys minus that of the k retrieved: 0 for query-head granularity, for
        a KV head that shares one set between query heads what the compromise cost this one.

    Returns
    -------
    Tensor
        ``[...]``, never above `middle_mass`.
    """
    return (_upcast(change) + anchor_gap).clamp(max=1.0) * middle_mass


def mean_interval(
    samples: ArrayLike, confidence: float = 0.95, seed: int = 0, resamples: int = 2000
) -> tuple[float, float, float]:
    """Mean of audited values in [0, 1] with its percentile-bootstrap interval, which stays in [0, 1] by itself.

    Parameters
    ----------
    samples : array_like
        Audited values, any shape (flattened).
    confidence : float
        Two-sided level in (0, 1).
    seed : int
        Seed of the resampling.
    resamples : int
        Bootstrap resamples, at least 1.

    Returns
    -------
    tuple of float
        (mean, low, high). No sample: three NaN; one sample: its value and two NaN. A handful of samples, or samples
        that are all equal, give an interval that is too narrow: print n beside it.

    Raises
    ------
    ValueError
        When a sample is NaN or infinite, or `confidence` or `resamples` is out of range.
    """
    x = np.asarray(samples, dtype=np.float64).ravel()
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence={confidence} is not between 0 and 1; pass e.g. 0.95")
    if resamples < 1:
        raise ValueError(f"resamples={resamples} must be at least 1; pass e.g. 2000")
    if not np.isfinite(x).all():
        raise ValueError(f"{int((~np.isfinite(x)).sum())} of {x.size} samples are not finite; drop them and count them")
    mean = float(x.mean()) if x.size else math.nan
    if x.size < 2:
        return mean, math.nan, math.nan
    rng = np.random.default_rng(seed)
    chunk = max(1, _BOOTSTRAP_CHUNK // x.size)
    sizes = [min(chunk, resamples - done) for done in range(0, resamples, chunk)]
    means = np.concatenate([x[rng.integers(0, x.size, (rows, x.size))].mean(-1) for rows in sizes])
    low, high = np.quantile(means, [(1.0 - confidence) / 2.0, (1.0 + confidence) / 2.0])
    return mean, float(low), float(high)


def _upcast(x: Tensor) -> Tensor:
    """Return `x` in float32, or as it is when it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def _per_query_head(x: Tensor, heads: int) -> Tensor:
    """Repeat a per-KV-head number ``[B, Hkv]`` for each query head: ``[B, H]``."""
    if heads % x.shape[-1]:
        raise ValueError(f"{heads} query heads are no multiple of {x.shape[-1]}; pass one number per KV or query head")
    return _upcast(x).repeat_interleave(heads // x.shape[-1], dim=-1)


def _selected(weights: Tensor, indices: Tensor) -> Tensor:
    """Turn indices into a bool ``[B, H, L]``; a mask counts a repeated index once."""
    if weights.ndim != 3 or indices.ndim != 3 or weights.shape[0] != indices.shape[0]:
        raise ValueError(
            f"weights {list(weights.shape)} and indices {list(indices.shape)} do not fit; "
            "pass weights [B, H, L] and indices [B, Hs, Kmax]"
        )
    if indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"indices are {indices.dtype}; pass int32 or int64 key indices, padded with -1")
    heads, length, groups = weights.shape[1], weights.shape[2], indices.shape[1]
    if groups == 0 or heads % groups:
        raise ValueError(f"{heads} query heads are no multiple of {groups} index rows; pass Hs = H or Hs = Hkv")
    if indices.device.type == "cpu" and indices.numel():  # elsewhere the check would wait for the device
        least, most = int(indices.min()), int(indices.max())
        if least < -1 or most >= length:
            wrong = least if least < -1 else most
            raise ValueError(f"index {wrong} is outside [-1, {length}); pass key columns, -1 for padding")
    columns = indices.long().where(indices >= 0, length)  # padding lands in an extra column
    mask = torch.zeros(*columns.shape[:2], length + 1, dtype=torch.bool, device=columns.device)
    return mask.scatter_(-1, columns, True)[..., :length].repeat_interleave(heads // groups, dim=1)


def _information_arguments(dropped: Tensor | float, n: int, steps: int) -> tuple[Tensor, float]:
    """Check the arguments of an information bound; return the mass in float64 and the value no information exceeds."""
    if n < 1 or steps < 1:
        raise ValueError(f"n={n}, steps={steps}: both count something and must be at least 1")
    x = torch.as_tensor(dropped, dtype=torch.float64)
    bad = x[~((x >= -1e-6) & (x <= 1.0 + 1e-6))]  # float32 masses overshoot by rounding; NaN is bad
    if bad.numel():
        raise ValueError(f"dropped mass {float(bad.flatten()[0])} is outside [0, 1]; pass a mean of dropped_mass")
    return x.clamp(0.0, 1.0), min(math.log(n), math.log(steps))
