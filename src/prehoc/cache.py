"""Preallocated KV storage of one layer, with the selection state of its sequences beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from prehoc.selection import Rows, State


class KVStore:
    """Keys and values of one layer in one buffer each; a decode step writes one column and copies nothing.

    Attributes
    ----------
    length : int
        Columns in use, padding included.
    rows : Rows
        Padding and prompt length of each batch row.
    state : State
        The selection state; dropped whenever the cached tokens change in any other way than by one more token.
    """

    def __init__(self) -> None:
        self.length = 0
        self.rows = Rows((), ())
        self.state = State()
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
        grown = new.new_empty((new.shape[0], new.shape[1], room, new.shape[3]))
        if buffer is not None:
            grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown

    def views(self) -> tuple[Tensor, Tensor]:
        """Return keys and values in use, as views ``[B, Hkv, n, D]``."""
        assert self._k is not None and self._v is not None
        return self._k[:, :, : self.length], self._v[:, :, : self.length]

    def selection_state(self, owner: object) -> State:
        """Return the state in which `owner` (a method's configuration) left this cache one token ago, else an empty one.

        Another method, or tokens that `owner` did not see, make the stored lists worthless.
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
        """Bytes held: keys and values, unused capacity included, and the selection state."""
        held = [self._k, self._v, *self.state.values()]
        return sum(b.numel() * b.element_size() for b in held if isinstance(b, Tensor))

    def take(self, index: Tensor) -> None:
        """Keep the batch rows at `index` (int64 ``[B']``), with their selection state."""
        if self._k is not None and self._v is not None:
            self._k, self._v = (b.index_select(0, index.to(b.device)) for b in (self._k, self._v))
        self.rows, self.state = self.rows.take(index), self.state.take(index)

    def crop(self, columns: int) -> None:
        """Forget the last `columns` columns and the selection state."""
        self.length = max(self.length - columns, 0)
        self.state = State()

    def reset(self) -> None:
        """Forget everything, the memory too."""
        self.__init__()  # type: ignore[misc]

    def copy(self) -> KVStore:
        """Return an independent copy: several methods can decode from one prefill."""
        twin = KVStore()
        twin.length, twin.rows = self.length, self.rows
        twin._owner, twin._seen = self._owner, self._seen
        twin.state = self.state.take(torch.arange(len(self.rows.pad)))
        twin._k = None if self._k is None else self._k.clone()
        twin._v = None if self._v is None else self._v.clone()
        return twin
