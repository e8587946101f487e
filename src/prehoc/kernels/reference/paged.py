"""Operations over a cache in blocks: the blocks of each row are put side by side, then the plain operation runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prehoc.kernels.reference.decode import decode_selected
from prehoc.kernels.reference.retrieve import Retrieval, retrieve


def gather_pages(blocks: Tensor, block_table: Tensor) -> Tensor:
    """Return ``[B, Hkv, max_blocks * block, D]`` from ``[NB, Hkv, block, D]`` and int ``[B, max_blocks]`` (negative: block 0)."""
    pages = blocks[block_table.clamp(min=0).long()]  # [B, max_blocks, Hkv, block, D]
    return pages.transpose(1, 2).flatten(2, 3).contiguous()


def decode_dense_paged(
    q: Tensor,
    k_blocks: Tensor,
    v_blocks: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
    with_lse: bool = False,
) -> Any:
    """Attend to every key of each row, kept in blocks.

    Parameters
    ----------
    q : Tensor
        ``[B, H, D]``.
    k_blocks, v_blocks : Tensor
        ``[NB, Hkv, block, D]`` with any strides; keys stored as ``[D, block]`` are passed as their transposed view.
    block_table : Tensor
        int32 ``[B, max_blocks]``, the block that holds a row's keys ``i * block`` to ``(i + 1) * block - 1``.
    lengths : Tensor
        int32 ``[B]``, keys of each row, at least one.
    scale : float
        Factor on the logits.
    with_lse : bool
        Also return the logarithm of each head's sum of exponentials, float32 ``[B, H]``.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        ``[B, H, D]`` in the dtype of q.
    """
    hkv, most = k_blocks.shape[1], int(lengths.max())
    indices = torch.arange(most, dtype=torch.int32, device=q.device).expand(q.shape[0], hkv, most)
    counts = lengths.to(torch.int32)[:, None].expand(-1, hkv)
    return decode_selected_paged(q, k_blocks, v_blocks, block_table, indices, counts, scale, with_lse)


def decode_selected_paged(
    q: Tensor,
    k_blocks: Tensor,
    v_blocks: Tensor,
    block_table: Tensor,
    indices: Tensor,
    counts: Tensor,
    scale: float,
    with_lse: bool = False,
) -> Any:
    """Attend to selected keys, int32 ``[B, Hs, K]`` logical positions, `counts` ``[B, Hs]`` of them; else as the dense form."""
    k, v = gather_pages(k_blocks, block_table), gather_pages(v_blocks, block_table)
    return decode_selected(q, k, v, indices, counts, scale, with_lse=with_lse)


def retrieve_paged(
    q: Tensor,
    k_blocks: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    heads: Tensor | None,
    selection_heads: int,
    sink: int,
    local: int,
    topk: int,
    scale: float,
    reduce: str = "max",
) -> Retrieval:
    """Return the best keys of each row's middle ``[sink, length - local)``, by logical position; else as `retrieve`.

    Parameters
    ----------
    q, k_blocks, block_table, lengths
        As in `decode_dense_paged`.
    heads, selection_heads, sink, local, topk, scale, reduce
        As in `retrieve`.

    Returns
    -------
    Retrieval
        ``order`` only.
    """
    b = q.shape[0]
    k, rows = gather_pages(k_blocks, block_table), lengths.tolist()
    chosen = list(range(b * selection_heads)) if heads is None else heads.tolist()
    order = torch.full((len(chosen), topk), -1, dtype=torch.int64, device=q.device)
    for i, pair in enumerate(chosen):
        row, head = divmod(pair, selection_heads)
        if rows[row] <= sink + local:
            continue
        one = slice(row, row + 1)
        among = torch.tensor([head], device=q.device)
        found = retrieve(
            q[one],
            k[one, :, : rows[row]],
            among,
            selection_heads,
            (0,),
            (sink,),
            sink,
            local,
            topk,
            scale,
            reduce=reduce,
        )
        order[i, : found.order.shape[1]] = found.order[0]
    return Retrieval(order)
