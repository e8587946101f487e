"""The gate of CIS: what a step compares with the anchors, and which heads an anchor speaks for."""

from __future__ import annotations

import torch
from torch import Tensor

from prehoc.kernels import host
from prehoc.selection import Step

GATES = ("score", "query", "key", "hidden")
AXES = 16  # more changed nothing on SmolLM2 and Qwen2.5, half as many little
SAMPLE = 1024  # keys that a covariance is taken of, evenly spaced


def axes(step: Step, sink: int) -> Tensor:
    """Return the principal axes of each KV head's keys, each as long as their standard deviation along it.

    The inner product of two queries projected on them is, but for the axes that were left out, the covariance over the keys
    of the scores that the two give. Taken of the prompt behind its sinks: whoever decodes, and when, finds the same. An
    accelerator waits for the host here, once a layer behind the prompt: the eigenvectors are a library's.

    Parameters
    ----------
    step : Step
        A step; only keys of the prompt are read (of a row without one, all that there are).
    sink : int
        First keys that are left out, where the prompt is long enough.

    Returns
    -------
    Tensor
        float32 ``[B, Hkv, D, W]``, contiguous, W = 16 or D if that is less.
    """
    b, hkv, _, d = step.k.shape
    begin, many = [], []
    for pad, prompt in zip(step.rows.pad, step.rows.prompt, strict=True):
        keys = prompt or step.columns - pad
        skip = sink if keys > sink + AXES else 0
        begin.append(pad + skip)
        many.append(keys - skip)
    device = step.k.device
    place = torch.arange(SAMPLE, device=device) * torch.tensor(many, device=device)[:, None] // SAMPLE
    place = place + torch.tensor(begin, device=device)[:, None]  # [B, SAMPLE]; fewer keys are taken more than once
    sample = step.k.gather(2, place[:, None, :, None].expand(b, hkv, SAMPLE, d)).float()
    noise = 1e-6 * sample.square().sum(-1).mean(-1)[..., None]  # [B, Hkv, 1]: what rounding may leave of no variance
    sample -= sample.mean(2, keepdim=True)
    covariance = sample.mT @ sample / SAMPLE
    total = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None]  # [B, Hkv, 1]
    varies = (total > noise) & (total < torch.inf)  # one key, or a broken row, must not keep the others from converging
    covariance = torch.where(varies[..., None], covariance / total[..., None], 0.0)
    shares, directions = torch.linalg.eigh(covariance)  # ascending
    variances = shares * total
    deviations = torch.where(varies & (variances > noise), variances, 0.0).sqrt()
    found: Tensor = directions[..., -AXES:] * deviations[..., None, -AXES:]
    return found.contiguous()


def compared(gate: str, step: Step, along: Tensor | None = None) -> Tensor:
    """Return the unit vectors that a gate compares at a step.

    Parameters
    ----------
    gate : {"query", "score", "key", "hidden"}
        Queries; queries in the axes of the keys; the newest keys as they lie in the cache, or the hidden state that enters the
        layer (PrHS, Table IX).
    step : Step
        The step.
    along : Tensor, optional
        The `axes`, for ``score``.

    Returns
    -------
    Tensor
        float32 ``[B, A, W]``: A = H queries, Hkv keys, or one hidden state a row. A vector of length zero gives NaN: it never
        shares.

    Raises
    ------
    ValueError
        When the step has no hidden state to compare.
    """
    if gate == "query":
        found = step.q.float()
    elif gate == "score":
        assert along is not None
        found = host.projected(step.q, along)
    elif gate == "key":
        found = step.k[:, :, -1].float()
    elif step.hidden is None:
        raise ValueError(
            "gate=hidden compares the hidden states that enter a layer, and recorded or drawn queries and keys have none: run "
            "the whole model, for example with prehoc trace, or take gate=score, query or key"
        )
    else:
        found = step.hidden[:, None].float()
    unit: Tensor = found / torch.linalg.vector_norm(found, dim=-1, keepdim=True)
    return unit


def cosines(unit: Tensor, anchor: Tensor, heads: int) -> Tensor:
    """Return float32 ``[B, heads]``: the least cosine of each head's vectors (``[B, A, W]``) with their anchors (NaN: none)."""
    each = (unit * anchor).sum(-1)  # [B, A]
    b, vectors = each.shape
    if vectors < heads:
        each = each.repeat_interleave(heads // vectors, 1)
    least: Tensor = each.view(b, heads, -1).amin(-1).clamp_(max=1.0)
    return least


def keep(anchor: Tensor, unit: Tensor, fresh: Tensor) -> None:
    """Make `unit` the anchors ``[B, A, W]``, in place, of the heads that `fresh` (bool ``[B, Hs]``) names.

    Heads that share a vector have retrieved at the same steps ever since: one of them speaks for all.
    """
    b, vectors, _ = anchor.shape
    if vectors < fresh.shape[1]:
        fresh = fresh.view(b, vectors, -1)[..., 0]
    mask = fresh.repeat_interleave(vectors // fresh.shape[1], 1)
    anchor.copy_(torch.where(mask[..., None], unit, anchor))
