"""The rows of the decode benchmark: ways to run one model, each with a cache and measurements of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from prehoc.bench.lineup import sized
from prehoc.books import Books, Stopwatch
from prehoc.config import unknown
from prehoc.integrations.transformers.compat import cache_key, output_cache
from prehoc.integrations.transformers.layers import fork, new_cache
from prehoc.integrations.transformers.session import Session, attach
from prehoc.kernels.flex import BLOCK, Pattern, decode_flex, whole
from prehoc.kernels.host import wait
from prehoc.methods import prefill_key
from prehoc.packing import packed
from prehoc.selection import Method, Selection, Step, Window
from prehoc.trace import last_only

STOCK = "sdpa"
STOCKS = (STOCK, "sdpa-static", "sdpa-compiled")
FLEX = "flex:"
COMPILED = "compiled:"
PACKED = "packed:"


@dataclasses.dataclass
class System:
    """One way to decode.

    Attributes
    ----------
    name : str
        ``sdpa`` (stock transformers, dynamic cache), ``sdpa-static`` (static cache), ``sdpa-compiled`` (static cache,
        ``torch.compile``), a method string, ``compiled:METHOD`` (``sparsify(compile=True)``) or ``flex:METHOD`` (the
        method's selection, FlexAttention for the attention); ``packed:SYSTEM`` is the system with the model's linear layers
        packed (`prehoc.packed`).
    method : Method or None
        The method; None for stock transformers.
    cache : Cache or None
        Its keys and values.
    prefill : float
        Seconds of the prompt.
    prefill_of : str
        The system whose prefill this one's cache is a copy of; empty when it read the prompt itself.
    steps : list of float
        Seconds of every timed decode step.
    parts : dict
        Seconds of attention, selection and rest, summed over `part_steps` steps.
    """

    name: str
    method: Method | None
    backend: str = ""
    cache: Any = None
    prefill: float = 0.0
    prefill_of: str = ""
    steps: list[float] = dataclasses.field(default_factory=list)
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    part_steps: int = 0
    books: Books = dataclasses.field(default_factory=Books)

    @classmethod
    def of(cls, name: str, context: int) -> System:
        """Return the system of a name; a method that has a budget and states no size gets an eighth of the context.

        Raises
        ------
        ValueError
            For an unknown kind or method.
        """
        named = cls(name, None)
        plain = named.plain
        if plain in STOCKS:
            return named
        if plain.startswith(STOCK):
            raise unknown("system", plain, STOCKS)
        return cls(name, sized(plain.removeprefix(COMPILED).removeprefix(FLEX), context))

    @property
    def plain(self) -> str:
        """The name without ``packed:``."""
        return self.name.removeprefix(PACKED)

    @property
    def packs(self) -> bool:
        """Whether the model's linear layers are packed."""
        return self.name.startswith(PACKED)

    def prefill_key(self) -> object:
        """Return what decides the keys and values after the prompt: systems with equal ones may copy each other's cache.

        Packed layers round otherwise and decide nothing: a prompt of minutes is not read twice for them.
        """
        return self.name if self.method is None else prefill_key(self.method)

    def read_prompt(self, model: Any, ids: Tensor, capacity: int, backend: str | None) -> None:
        """Prefill ``ids`` (int64 ``[B, T]``) into a new cache with room for `capacity` tokens."""
        key = cache_key({}, model)
        if self.method is None:
            if self.plain != STOCK:
                self.cache = StaticCache(config=model.config, max_cache_len=capacity)
            with self._layers(model):
                begin = time.perf_counter()
                found = output_cache(model(input_ids=ids, use_cache=True, **{key: self.cache}, **last_only(model)))
                wait(ids.device)
                self.prefill, self.cache = time.perf_counter() - begin, found
            return
        with self._layers(model), self._session(model, backend, 0.0, 0):
            self.cache = new_cache(model.config, -(-capacity // BLOCK) * BLOCK)  # whole blocks for FlexAttention
            begin = time.perf_counter()
            model(input_ids=ids, use_cache=True, **{key: self.cache}, **last_only(model))
            wait(ids.device)
            self.prefill = time.perf_counter() - begin

    def copy_prompt(self, other: System) -> None:
        """Take a copy of another system's cache instead of reading the prompt."""
        self.cache, self.prefill, self.prefill_of = fork(other.cache), other.prefill, other.name

    def decode(self, model: Any, ids: Tensor, kind: str, backend: str | None, seed: int) -> None:
        """Decode the tokens ``ids`` (int64 ``[B, S]``) one by one: ``warm``, ``timed``, ``parts`` or ``audit``."""
        key, call = cache_key({}, model), _compiled(model) if self.plain == "sdpa-compiled" else model
        audit = 0.05 if kind == "audit" else 0.0
        attached = contextlib.nullcontext() if self.method is None else self._session(model, backend, audit, seed)
        with self._layers(model), attached as session:
            if session is not None and kind == "parts":
                session.stopwatch = Stopwatch(ids.device)
            for i in range(ids.shape[1]):
                begin = time.perf_counter()
                call(input_ids=ids[:, i : i + 1], use_cache=True, **{key: self.cache})
                wait(ids.device)
                if kind == "timed":
                    self.steps.append(time.perf_counter() - begin)
            if session is not None and session.stopwatch is not None:
                self.parts, self.part_steps = session.stopwatch.seconds, ids.shape[1]

    def _layers(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        return packed(model) if self.packs else contextlib.nullcontext()

    @contextlib.contextmanager
    def _session(self, model: Any, backend: str | None, audit: float, seed: int) -> Iterator[Session]:
        assert self.method is not None
        compiled = self.plain.startswith(COMPILED)
        session = attach(model, self.method, audit=audit, backend=backend, seed=seed, compile=compiled)
        try:
            session.books, self.backend = self.books, session.backend
            if self.plain.removeprefix(COMPILED).startswith(FLEX):
                session.attend = _flex_attend
            yield session
        finally:
            session.detach()

    def cache_bytes(self) -> int:
        """Return the bytes that the cache holds, reserved room and selection state included."""
        total = 0
        for layer in self.cache.layers:
            held = [layer.store] if hasattr(layer, "store") else [layer.keys, layer.values]
            total += sum(part.nbytes for part in held if part is not None)
        return total


@functools.lru_cache(maxsize=1)
def _compiled(model: Any) -> Any:
    return torch.compile(model, dynamic=False)


@functools.lru_cache(maxsize=4)
def _pattern(batch: int, heads: int, columns: int, device: torch.device) -> Pattern:
    return Pattern(batch, heads, columns, device)


def _flex_attend(ops: Any, step: Step, chosen: Selection | Window | None) -> Tensor:
    """Build the BlockMask of a selection and attend with compiled FlexAttention over the whole buffer."""
    b, heads = step.q.shape[:2]
    columns = step.k.stride(1) // step.k.shape[3]  # of the buffer behind the view
    k, v = (whole(x, columns) for x in (step.k, step.v))
    mask = _pattern(b, heads, columns, step.q.device).build(step, chosen)
    return decode_flex(step.q, k, v, mask, step.scale)
