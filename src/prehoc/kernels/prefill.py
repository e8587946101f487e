"""Attention of many queries at once, by blocks of queries against their visible slice: work that is pruned is not done."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128


def prefill_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: tuple[int, ...],
    scale: float,
    hidden: Callable[[int], int] | None = None,
    sink: int = 0,
) -> tuple[Tensor, int]:
    """Attend causally, bottom-right aligned, each query to the sinks and to its visible window.

    The query of cache column c belongs to token t = c - first + 1 of its row and sees the row's first `sink` tokens and its
    tokens from ``hidden(t)`` on. Rows are handled without their padding, and no mask larger than one block of queries
    against its keys exists.

    Parameters
    ----------
    q : Tensor
        ``[B, H, T, D]``, the queries of the last T columns.
    k, v : Tensor
        ``[B, Hkv, n, D]``.
    first : tuple of int
        Per row, the first real column.
    scale : float
        Factor on the logits.
    hidden : callable, optional
        Tokens hidden from a query that sees t keys, not decreasing in t; None: nothing is hidden.
    sink : int
        First tokens that are always visible.

    Returns
    -------
    out : Tensor
        ``[B, H, T, D]``; zeros for padding.
    pairs : int
        Query-key pairs processed (per query head, summed over rows).
    """
    b, h, tokens, _ = q.shape
    n = k.shape[2]
    if len(set(first)) == 1 and n - tokens >= first[0]:
        out, pairs = _rows(q, k, v, first[0], scale, hidden, sink)
        return out, pairs * b
    out, total = q.new_zeros((b, h, tokens, v.shape[-1])), 0
    for row, begin in enumerate(first):
        skip = max(begin - (n - tokens), 0)  # leading queries that are padding
        if skip < tokens:
            one = slice(row, row + 1)
            out[one, :, skip:], pairs = _rows(q[one, :, skip:], k[one], v[one], begin, scale, hidden, sink)
            total += pairs
    return out, total


def causal_pairs(begin: int, end: int, window: int | None = None) -> int:
    """Return the query-key pairs of causal attention for the queries of tokens `begin` to `end` - 1 (below 0: none)."""

    def triangle(t: int) -> int:
        return t * (t + 1) // 2

    def below(t: int) -> int:  # pairs of the first t tokens
        t = max(t, 0)
        return triangle(t) if window is None or t <= window else triangle(window) + (t - window) * window

    return below(end) - below(begin)


def _rows(
    q: Tensor, k: Tensor, v: Tensor, first: int, scale: float, hidden: Callable[[int], int] | None, sink: int
) -> tuple[Tensor, int]:
    """Rows that start at the same column and whose queries are all real."""
    k, v = k[:, :, first:], v[:, :, first:]
    tokens, n = q.shape[2], k.shape[2]
    if tokens == n and (hidden is None or hidden(n) <= sink):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out, causal_pairs(0, tokens)
    parts, pairs = [], 0
    for a in range(0, tokens, BLOCK):
        block = q[:, :, a : a + BLOCK]
        part, done = _block(block, k, v, n - tokens + a, scale, hidden, sink)
        parts.append(part)
        pairs += done
    return torch.cat(parts, 2), pairs


def _block(
    q: Tensor, k: Tensor, v: Tensor, position: int, scale: float, hidden: Callable[[int], int] | None, sink: int
) -> tuple[Tensor, int]:
    """One block of queries, the first of which is token number `position`."""
    size, end = q.shape[2], position + q.shape[2]
    low = [hidden(t) if hidden else 0 for t in range(position + 1, end + 1)]
    begin = low[0] if low[0] > sink else 0
    query = torch.arange(position, end, device=q.device)[:, None]  # [size, 1]
    key = torch.arange(begin, end, device=q.device)
    mask = key <= query
    if low[-1] > begin:
        mask &= (key >= torch.tensor(low, device=q.device)[:, None]) | (key < sink)
    keys, values = k[:, :, begin:end], v[:, :, begin:end]
    if begin and sink:
        keys, values = torch.cat([k[:, :, :sink], keys], 2), torch.cat([v[:, :, :sink], values], 2)
        mask = F.pad(mask, (sink, 0), value=True)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
    # as dense is counted: pairs above the diagonal are not work, whatever a block does with them
    return out, size * keys.shape[2] - causal_pairs(0, size - 1)
