"""A selection as a BlockMask for torch's compiled FlexAttention: the comparison that a block-sparse kernel deserves.

It is no backend: a block of 128 keys is read whole if one of its keys is selected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from prehoc.selection import Selection, Step, Window

BLOCK = 128


class Pattern:
    """The keys that a decode step reads, as FlexAttention wants them; one object serves all steps of a cell.

    Its tensors keep their shape and are overwritten in place, so that nothing is compiled twice.

    Parameters
    ----------
    batch, heads, columns : int
        B, H and the columns of the whole buffer, a multiple of `BLOCK`: those behind the newest key are masked.
    device : device
        Where the masks live.
    """

    def __init__(self, batch: int, heads: int, columns: int, device: torch.device) -> None:
        if columns % BLOCK:
            raise ValueError(f"{columns} columns are no multiple of {BLOCK}; give a length that is")
        self.keep = torch.zeros((batch, heads, columns), dtype=torch.bool, device=device)
        # of the blocks read in part and of those read whole: how many, and which
        self._counts = torch.zeros((2, batch, heads, 1), dtype=torch.int32, device=device)
        self._orders = torch.zeros((2, batch, heads, 1, columns // BLOCK), dtype=torch.int32, device=device)
        keep = self.keep

        def selected(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return keep[row, head, key]

        self._selected = selected

    def build(self, step: Step, chosen: Selection | Window | None) -> BlockMask:
        """Return the mask of a decision.

        Parameters
        ----------
        step : Step
            The step.
        chosen : Selection, Window or None
            What it reads (None: every visible key).
        """
        batch, heads, columns = self.keep.shape
        if isinstance(chosen, Selection):
            at = chosen.indices.long().repeat_interleave(heads // chosen.indices.shape[1], 1)  # [B, H, K]
            wide = self.keep.new_zeros((batch, heads, columns + 1))
            used = torch.arange(at.shape[2], device=at.device) < chosen.lengths.repeat_interleave(
                heads // chosen.lengths.shape[1], 1
            ).unsqueeze(-1)
            wide.scatter_(2, at.where(used, columns), True)  # padding lands in the extra column
            self.keep.copy_(wide[..., :columns])
        else:
            starts = step.rows.pad if chosen is None else chosen.start
            sink = 0 if chosen is None else chosen.sink
            self.keep.zero_()
            for row, (pad, start) in enumerate(zip(step.rows.pad, starts, strict=True)):
                self.keep[row, :, pad : pad + sink] = True
                self.keep[row, :, start : step.columns] = True
        grid = self.keep.view(batch, heads, -1, BLOCK)
        whole = grid.all(-1)  # [B, H, blocks]
        hits = torch.stack([grid.any(-1) & ~whole, whole]).to(torch.int8)
        self._counts.copy_(hits.sum(-1, keepdim=True))
        self._orders.copy_(hits.sort(dim=-1, descending=True, stable=True).indices[:, :, :, None])
        return BlockMask.from_kv_blocks(
            self._counts[0],
            self._orders[0],
            self._counts[1],
            self._orders[1],
            BLOCK_SIZE=BLOCK,
            mask_mod=self._selected,
            seq_lengths=(1, columns),
        )

    def blocks(self) -> int:
        """Return the blocks read by the mask built last, summed over rows and query heads."""
        return int(self._counts.sum())


def whole(view: Tensor, columns: int) -> Tensor:
    """Return the buffer ``[B, Hkv, columns, D]`` behind a view of its first columns."""
    b, heads, _, d = view.shape
    return view.as_strided((b, heads, columns, d), view.stride())


def decode_flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """Attend with compiled FlexAttention.

    Parameters
    ----------
    q : Tensor
        ``[B, H, D]``.
    k, v : Tensor
        ``[B, Hkv, columns, D]``, the whole buffer.
    mask : BlockMask
        Of `Pattern.build`.
    scale : float
        Factor on the logits.

    Returns
    -------
    Tensor
        ``[B, H, D]`` in the dtype of q.
    """
    out: Tensor = _compiled()(q[:, :, None], k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out[:, :, 0]


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)
