"""Preallocated KV storage of one layer, with the selection state of its sequences beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from prehoc.kernels.host import advise_large_pages
from prehoc.selection import Rows, State

SPARE = 32  # columns that an evicted store allocates ahead: the capacity of a whole text is no longer needed


class KVStore:
    """Keys and values of one layer in one buffer each; a decode step writes one column and copies nothing.

    Attributes
    ----------
    length : int
        Columns in use, padding included.
    dropped : int
        Columns that were evicted: the text has `length` + `dropped`.
    first : tuple of int or None
        Evicted stores: the first column in use of each row; None while every key is there, behind the row's padding.
    rows : Rows
        Padding and prompt length of each batch row.
    state : State
        The selection state; dropped whenever the cached tokens change in any other way than by one more token.
    notes : State
        What an evicting method remembers of the tokens it has seen, over all turns.
    """

    def __init__(self) -> None:
        self.length = self.dropped = 0
        self.rows = Rows((), ())
        self.first: tuple[int, ...] | None = None
        self.state, self.notes = State(), State()
        self._columns: Tensor | None = None  # int32 [B, Hkv, room], evicted stores: which column of the text a key is
        self._owner: object = None
        self._seen = -1
        self._k: Tensor | None = None
        self._v: Tensor | None = None

    def append(self, k: Tensor, v: Tensor, capacity: int = 0) -> tuple[Tensor, Tensor]:
        """Write new columns and return views of all.

        Parameters
        ----------
        k, v : Tensor
            ``[B, Hkv, T, D]`` and ``[B, Hkv, T, Dv]``, any float dtype.
        capacity : int
            Columns to reserve when memory is allocated; beyond it the buffer doubles.

        Returns
        -------
        k, v : Tensor
            Views ``[B, Hkv, n, D]`` and ``[B, Hkv, n, Dv]`` of the buffers.
        """
        k, v = k.detach(), v.detach()  # a cache is for inference: it must not keep a graph alive
        end = self.length + k.shape[2]
        if self._columns is not None:
            capacity = end + SPARE
            text = torch.arange(self.length, end, dtype=torch.int32, device=k.device) + self.dropped
            new = text.expand(*k.shape[:2], -1)[..., None]
            self._columns = self._fit(self._columns[..., None], new, end, capacity)[..., 0]
            self._columns[:, :, self.length : end] = new[..., 0]
        self._k, self._v = self._fit(self._k, k, end, capacity), self._fit(self._v, v, end, capacity)
        self._k[:, :, self.length : end] = k
        self._v[:, :, self.length : end] = v
        self.length = end
        return self.views()

    def _fit(self, buffer: Tensor | None, new: Tensor, end: int, capacity: int) -> Tensor:
        if buffer is not None and end <= buffer.shape[2]:
            # made under inference_mode and continued outside of it: such a tensor cannot be written to
            return buffer.clone() if buffer.is_inference() and not torch.is_inference_mode_enabled() else buffer
        room = max(end, capacity if capacity >= end or buffer is None else 2 * buffer.shape[2])
        grown = _new(new, room)
        if buffer is not None:
            grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown

    def views(self) -> tuple[Tensor, Tensor]:
        """Return keys and values in use, as views ``[B, Hkv, n, D]``."""
        assert self._k is not None and self._v is not None
        return self._k[:, :, : self.length], self._v[:, :, : self.length]

    def columns(self) -> Tensor:
        """Return which column of the text each key is, int32 ``[B, Hkv, n]``; in no order after `replace`."""
        if self._columns is not None:
            return self._columns[:, :, : self.length]
        k, _ = self.views()
        return torch.arange(self.length, dtype=torch.int32, device=k.device).expand(*k.shape[:2], -1)

    def evict(self, keep: Tensor, first: tuple[int, ...]) -> None:
        """Keep some columns of each head and give the memory of all others back.

        Parameters
        ----------
        keep : Tensor
            int64 ``[B, Hkv, K]``, columns in the order they are to have.
        first : tuple of int
            Per row, how many leading entries of `keep` stand for nothing.
        """
        room = keep.shape[2] + SPARE

        def kept(buffer: Tensor) -> Tensor:
            out = buffer.new_zeros((*buffer.shape[:2], room, buffer.shape[3]))
            out[:, :, : keep.shape[2]] = buffer.gather(2, keep[..., None].expand(-1, -1, -1, buffer.shape[3]))
            return out

        columns = kept(self.columns()[..., None])[..., 0]
        self._k, self._v = (kept(buffer) for buffer in self.views())
        self._columns, self.first = columns, first
        self.dropped += self.length - keep.shape[2]
        self.length = keep.shape[2]

    def replace(self, slot: Tensor, full: tuple[bool, ...], *others: Tensor) -> tuple[Tensor, ...]:
        """Evict the key in one slot of each head of the rows that are full.

        The newest key takes the slot and the last column is free again; while some rows still grow, a full row's first key
        takes it, and the row begins one column later.

        Parameters
        ----------
        slot : Tensor
            int64 ``[B, Hkv]``.
        full : tuple of bool
            Per row.
        *others : Tensor
            More numbers of each key, ``[B, Hkv, n]``.

        Returns
        -------
        tuple of Tensor
            `others`, as long as the store is now.
        """
        assert self._columns is not None and self._k is not None and self._v is not None and self.first is not None
        everywhere = all(full)
        source = [self.length - 1 if everywhere else begin for begin in self.first]
        held = torch.tensor(source, device=slot.device)[:, None].expand_as(slot)
        target = slot if everywhere else torch.where(torch.tensor(full, device=slot.device)[:, None], slot, held)
        b, heads = (torch.arange(size, device=slot.device) for size in slot.shape)
        for buffer in (self._k, self._v, self._columns, *others):
            buffer[b[:, None], heads, target] = buffer[b[:, None], heads, held]  # a scatter of rows is slow on CPUs
        if everywhere:
            self.length -= 1
            self.dropped += 1
        else:
            self.first = tuple(begin + went for begin, went in zip(self.first, full, strict=True))
        return tuple(other[..., : self.length] for other in others)

    def selection_state(self, owner: object) -> State:
        """Return the state in which `owner` left this cache one token ago, else an empty one.

        An owner is a method's configuration, with its kernel backend where the state depends on it. Another one, or tokens that
        `owner` did not see, make the stored lists worthless.
        """
        if self._owner != owner or self._seen != self.length - 1:
            self.state.clear()
        self._owner, self._seen = owner, self.length
        if not torch.is_inference_mode_enabled():
            for name, value in self.state.items():
                if isinstance(value, Tensor) and value.is_inference():
                    self.state[name] = value.clone()
        return self.state

    @property
    def nbytes(self) -> int:
        """Bytes held: keys and values, unused capacity included, the selection state and the notes."""
        held = [self._k, self._v, self._columns, *self.state.values(), *self.notes.values()]
        return sum(b.numel() * b.element_size() for b in held if isinstance(b, Tensor))

    def take(self, index: Tensor) -> None:
        """Keep the batch rows at `index` (int64 ``[B']``), with their selection state."""
        if self._k is not None and self._v is not None:
            self._k, self._v = (b.index_select(0, index.to(b.device)) for b in (self._k, self._v))
        if self._columns is not None:
            self._columns = self._columns.index_select(0, index.to(self._columns.device))
        if self.first is not None:
            self.first = Rows(self.first, self.first).take(index).pad
        self.rows, self.state, self.notes = self.rows.take(index), self.state.take(index), self.notes.take(index)

    def crop(self, columns: int) -> None:
        """Forget the last `columns` columns, the selection state and the notes; 0 changes nothing.

        Raises
        ------
        ValueError
            When keys were evicted: which ones depends on the tokens that are to be forgotten.
        """
        if not columns:
            return
        if self._columns is not None:
            raise ValueError("tokens of a cache with evicted keys cannot be taken back; read the text again")
        self.length = max(self.length - columns, 0)
        self.state, self.notes = State(), State()

    def reset(self) -> None:
        """Forget everything, the memory too."""
        self.__init__()  # type: ignore[misc]

    def copy(self) -> KVStore:
        """Return an independent copy: several methods can decode from one prefill."""
        twin = KVStore()
        twin.length, twin.dropped, twin.rows, twin.first = self.length, self.dropped, self.rows, self.first
        twin._owner, twin._seen = self._owner, self._seen
        every = torch.arange(len(self.rows.pad))
        twin.state, twin.notes = self.state.take(every), self.notes.take(every)
        twin._columns = None if self._columns is None else self._columns.clone()
        twin._k, twin._v = (None if b is None else _new(b, b.shape[2]).copy_(b) for b in (self._k, self._v))
        return twin


def _new(like: Tensor, columns: int) -> Tensor:
    """Return an empty ``[B, Hkv, columns, D]`` beside `like` (``[B, Hkv, n, D]``), in large pages where they are to be had."""
    buffer = like.new_empty((like.shape[0], like.shape[1], columns, like.shape[3]))
    advise_large_pages(buffer)
    return buffer
