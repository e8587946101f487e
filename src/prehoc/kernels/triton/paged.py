"""Attention over keys and values that are kept in blocks, as serving engines keep them: no block is copied or moved."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from prehoc.kernels.triton.decode import attend


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
        ``[NB, Hkv, block, D]`` with any strides.
    block_table : Tensor
        int32 ``[B, max_blocks]``, the block that holds a row's keys ``i * block`` to ``(i + 1) * block - 1``.
    lengths : Tensor
        int32 ``[B]``, keys of each row.
    scale : float
        Factor on the logits.
    with_lse : bool
        Also return the logarithm of each head's sum of exponentials, float32 ``[B, H]``.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        ``[B, H, D]`` in the dtype of q.
    """
    keys = block_table.shape[1] * k_blocks.shape[2]
    return attend(q, k_blocks, v_blocks, scale, with_lse, keys, counts=lengths.contiguous(), table=block_table)


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
    lists, counts = indices.contiguous(), counts.contiguous()
    return attend(
        q, k_blocks, v_blocks, scale, with_lse, indices.shape[2], lists=lists, counts=counts, table=block_table
    )
