"""What a trace measures at one layer of one decode step, from the exact attention weights of that step."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prehoc.config import DEFAULT_LOCAL, DEFAULT_SINK
from prehoc.kernels.reference import ranked
from prehoc.selection import Decision, Plan, Selection, Step, Window

RECORDS = ("selections", "qk", "qkv")
FIELDS: dict[str, tuple[Any, float]] = {  # dtype, and the value where there is nothing to say
    "retained": (np.float32, np.nan),
    "oracle": (np.float32, np.nan),
    "oracle_equal_keys": (np.float32, np.nan),
    "retrieved": (np.bool_, False),
    "counted": (np.bool_, False),
    "keys": (np.int32, -1),
    "overlap": (np.float32, np.nan),
    "cosine": (np.float32, np.nan),
    "consecutive": (np.float32, np.nan),
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes an oracle is given: those of the method it stands beside.

    Parameters
    ----------
    sink, local : int
        First and last keys that are always read.
    critical : int or None
        Keys it may choose; None without a `mass`: as many as the method left for it (a method without a budget).
    mass : float, optional
        It takes the fewest best keys with which every query head of the group retains this mass, `critical` at most.
    """

    sink: int
    local: int
    critical: int | None = None
    mass: float | None = None

    @classmethod
    def of(cls, plan: Plan, prompt_tokens: int) -> Sizes:
        """Return the sizes of a plan; without a selector, the sink and local keys of its depth window or the defaults."""
        if plan.selector is not None:
            budget = plan.selector.size()
            return cls(budget.sink, budget.local, budget.critical_for(prompt_tokens), budget.mass)
        if plan.window is not None:
            return cls(plan.window.sink, plan.window.local)
        return cls(DEFAULT_SINK, DEFAULT_LOCAL)


class Exact:
    """The exact attention of one step of one layer (one batch row, no padding) and its best keys.

    Parameters
    ----------
    step : Step
        The step, with a batch of one.
    heads : int
        Hs, selection heads.
    sink, local : int
        Sizes of what lies before and behind the whole middle ``[sink, t - local)``.

    Attributes
    ----------
    weights : Tensor
        float32 ``[Hs, G, n]`` attention weights.
    mean : Tensor
        float32 ``[Hs, n]``, their mean over the query heads of a group.
    middle : int
        Keys of the middle.
    """

    def __init__(self, step: Step, heads: int, sink: int, local: int) -> None:
        k = step.k[0].float()  # [Hkv, n, D]
        n = k.shape[1]
        queries = step.q[0].float().view(k.shape[0], -1, k.shape[2])  # [Hkv, H / Hkv, D]
        self.weights = torch.softmax(queries @ k.mT * step.scale, -1).view(heads, -1, n)
        self.mean = self.weights.mean(1)
        self._begin = min(sink, n)
        self._end = max(n - local, self._begin)
        self.middle = self._end - self._begin
        self._base = self.weights[..., : self._begin].double().sum(-1) + self.weights[..., self._end :].double().sum(-1)
        self._order = torch.empty(heads, 0, dtype=torch.int64, device=k.device)
        self._mass = self._base.mean(-1, keepdim=True)  # [Hs, 1 + ranked keys]

    def order(self, count: int) -> Tensor:
        """Return int64 ``[Hs, count]``: columns of the middle by falling mean weight; ties: the lower column first."""
        if count > self._order.shape[1]:
            enough = min(self.middle, 1 << (count - 1).bit_length())  # few methods at one step: rank few times
            middle = self.mean[:, self._begin : self._end]
            best = ranked(middle, enough)
            self._order = best + self._begin
            gained = middle.gather(1, best).double().cumsum(-1)
            self._mass = torch.cat([self._mass[:, :1], self._mass[:, :1] + gained], -1)
        return self._order[:, :count]

    def best(self, count: Tensor) -> Tensor:
        """Return float64 ``[Hs]``: mass of sinks, local keys and the best `count` (int64 ``[Hs]``) keys of the middle."""
        self.order(int(count.max()))
        return self._mass.gather(1, count[:, None])[:, 0]

    def fewest(self, mass: float, most: int) -> Tensor:
        """Return int64 ``[Hs]``: the fewest best keys, `most` at most, with which every query head retains `mass`."""
        chosen = self.order(most)[:, None].expand(-1, self.weights.shape[1], -1)
        reached = self._base[..., None] + self.weights.gather(2, chosen).double().cumsum(-1)  # [Hs, G, most]
        count = ((reached < mass).any(1).sum(-1) + 1).clamp(max=most)
        return torch.where((self._base >= mass).all(-1), 0, count)


class TraceRecorder:
    """Collects the arrays of a trace; takes in every full-attention layer of every decode step.

    Parameters
    ----------
    plan : Plan
        What the method asks for.
    prompt_tokens, steps : int
        P and S.
    layers : int
        N, sliding layers included: these keep the values that `FIELDS` gives for nothing.
    granularity : {"kv_head", "query_head"}
        What a selection head is.
    record : tuple of str
        Any of `RECORDS`; ``qkv`` is ``qk`` and the values.
    """

    def __init__(
        self, plan: Plan, prompt_tokens: int, steps: int, layers: int, granularity: str, record: tuple[str, ...] = ()
    ) -> None:
        self.sizes = Sizes.of(plan, prompt_tokens)
        self.scale: dict[int, float] = {}
        self._granularity, self._record = granularity, record
        self._prompt, self._steps, self._layers = prompt_tokens, steps, layers
        self._arrays: dict[str, NDArray[Any]] = {}
        self._columns: dict[tuple[int, int], NDArray[np.int32]] = {}
        self._last: dict[int, Tensor] = {}

    def record(self, step: Step, v: Tensor, decision: Decision) -> None:
        """Measure one layer of one step; nothing that decoding uses is changed."""
        self.measure(step, decision, self.exact(step))

    def exact(self, step: Step) -> Exact:
        """Return the exact attention that `measure` needs (the replay of several settings makes it once)."""
        return Exact(step, self._heads(step), self.sizes.sink, self.sizes.local)

    def measure(self, step: Step, decision: Decision, exact: Exact) -> None:
        """Enter one layer of one step.

        Parameters
        ----------
        step : Step
            The step, with a batch of one.
        decision : Decision
            What the method reads.
        exact : Exact
            The exact attention of this step.
        """
        read, keys = _read(step, decision.selection, exact)
        as_many = (keys - self.sizes.sink - self.sizes.local).clamp(0, exact.middle)
        critical = self._critical(exact, as_many)
        exact.order(int(torch.maximum(critical, as_many).max()))  # rank once for all that follows
        order = exact.order(int(critical.max()))
        among = (
            torch.arange(order.shape[1], device=keys.device) < critical[:, None]
        )  # [Hs, m], the oracle's critical keys
        hits = (read.gather(1, order) & among).sum(-1)
        values: dict[str, Any] = {
            "retained": 1.0 if decision.selection is None else (exact.mean * read).double().sum(-1),
            "oracle": exact.best(critical),
            "oracle_equal_keys": exact.best(as_many),
            "retrieved": False if decision.retrieved is None else decision.retrieved[0],
            "counted": bool(decision.counted and decision.counted[0]),
            "keys": keys,
            "overlap": hits / critical,  # 0 / 0 = NaN: no critical keys
            "cosine": np.nan if decision.cosine is None else decision.cosine[0],
            "consecutive": self._consecutive(step),
        }
        at = (step.columns - self._prompt - 1, step.layer)
        for name, value in values.items():
            self._array(name, step)[at] = value.cpu().numpy() if isinstance(value, Tensor) else value
        if "selections" in self._record:
            self._columns[at] = _lists(read)
        if "qk" in self._record or "qkv" in self._record:
            self._keep(step, at)

    def _critical(self, exact: Exact, as_many: Tensor) -> Tensor:
        """Return int64 ``[Hs]``: how many keys of the middle the oracle chooses."""
        if self.sizes.critical is None and self.sizes.mass is None:
            return as_many
        most = exact.middle if self.sizes.critical is None else min(self.sizes.critical, exact.middle)
        if self.sizes.mass is not None:
            return exact.fewest(self.sizes.mass, most)
        return torch.full_like(as_many, most)

    def _heads(self, step: Step) -> int:
        return step.k.shape[1] if self._granularity == "kv_head" else step.q.shape[1]

    def _array(self, name: str, step: Step) -> NDArray[Any]:
        if name not in self._arrays:
            dtype, empty = FIELDS[name]
            self._arrays[name] = np.full((self._steps, self._layers, self._heads(step)), empty, dtype)
        return self._arrays[name]

    def _consecutive(self, step: Step) -> Tensor | float:
        """Return float32 ``[Hs]``: the least cosine over a group of this step's queries with those of the step before."""
        q = step.q[0].float()
        before = self._last.get(step.layer)
        self._last[step.layer] = q.clone()
        if before is None:
            return np.nan
        return torch.cosine_similarity(q, before, dim=-1, eps=0.0).view(self._heads(step), -1).amin(-1)

    def _keep(self, step: Step, at: tuple[int, int]) -> None:
        _, h, d = step.q.shape
        if "q" not in self._arrays:
            self._arrays["q"] = np.full((self._steps, self._layers, h, d), np.nan, np.float32)
        self.scale[step.layer] = step.scale
        self._arrays["q"][at] = step.q[0].float().cpu().numpy()
        new = (
            slice(0, step.columns) if at[0] == 0 else slice(step.columns - 1, step.columns)
        )  # cached ones never change
        for name, cached in (("k", step.k), ("v", step.v))[: 2 if "qkv" in self._record else 1]:
            if name not in self._arrays:
                size = (self._layers, cached.shape[1], self._prompt + self._steps, cached.shape[3])
                self._arrays[name] = np.full(size, np.nan, np.float32)
            self._arrays[name][step.layer, :, new] = cached[0, :, new].float().cpu().numpy()

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by name.

        Raises
        ------
        ValueError
            When no step was seen: the model has no full-attention layer.
        """
        if not self._arrays:
            raise ValueError("nothing was recorded: the model has no full-attention layer to select in")
        if self._columns:
            heads, widest = self._arrays["keys"].shape[2], max(x.shape[1] for x in self._columns.values())
            indices = np.full((self._steps, self._layers, heads, widest), -1, np.int32)
            for at, columns in self._columns.items():
                indices[(*at, slice(None), slice(columns.shape[1]))] = columns
            return {**self._arrays, "indices": indices}
        return dict(self._arrays)


def _read(step: Step, chosen: Selection | Window | None, exact: Exact) -> tuple[Tensor, Tensor]:
    """Return bool ``[Hs, n]``, the keys that are read, and int64 ``[Hs]``, how many a kernel processes."""
    hs, n = exact.mean.shape
    read = torch.zeros(hs, n + 1, dtype=torch.bool, device=exact.mean.device)
    if isinstance(chosen, Selection):
        count = chosen.lengths[0].long()
        used = torch.arange(chosen.indices.shape[2], device=read.device) < count[:, None]
        read.scatter_(1, chosen.indices[0].long().where(used, n), True)  # padding lands in the extra column
        return read[:, :n], count
    begin = 0 if chosen is None else chosen.start[0]
    read[:, begin:n] = True
    if chosen is not None:
        read[:, : min(chosen.sink, n)] = True
    return read[:, :n], read[:, :n].sum(-1)


def _lists(read: Tensor) -> NDArray[np.int32]:
    """Return int32 ``[Hs, K]``: the columns that are read, ascending, padded with -1."""
    lists = [np.flatnonzero(row) for row in read.cpu().numpy()]
    out = np.full((len(lists), max(len(x) for x in lists)), -1, np.int32)
    for row, columns in zip(out, lists, strict=True):
        row[: len(columns)] = columns
    return out
