"""Random expansion: the control of CIS that adds as many keys as dilation would, but drawn at random."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, Literal

import torch
from torch import Tensor

from prehoc.config import check_int
from prehoc.kernels import host
from prehoc.methods._retrieval import as_selection
from prehoc.methods.cis import CIS
from prehoc.selection import Decision, Selection, State, Step

_TOKEN_BITS = 25  # of a priority: tokens of a row; the rest is the draw
_LAST = torch.iinfo(torch.int64).max


@dataclasses.dataclass(frozen=True)
class RandomExpansion(CIS):
    """Share as CIS does, but replace the neighbours that dilation adds by equally many keys drawn at random.

    Source: the PrHS paper, Tables VI and VII (RandomExpansion). Each head draws anew at each of its retrievals, among all keys
    that its undilated set leaves out; the draw depends on `seed`, layer, head and token only, never on the rest of a batch.

    Parameters
    ----------
    seed : int
        Seed of the draws.
    gate
        As in `CIS`; the default is that of ``cis-8``, whose control this is.
    budget, ratio, critical, mass, sink, local, block_size, tau, dilate, radius, refresh, local_window, granularity
        As in `CIS`.
    retrieval, rerank
        As in `CIS`.

    Raises
    ------
    ValueError
        As `CIS`, and for ``matched``.
    """

    name: ClassVar[str] = "random_expansion"

    gate: Literal["score", "query", "key", "hidden"] = "query"  # as `cis-8`, which it is the control of
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("seed", self.seed, 0)
        if self.matched:
            raise ValueError("matched=true has no random form: give a smaller budget, or method cis-star")

    @functools.cached_property
    def _parts(self) -> tuple[CIS, CIS]:
        """CIS without and with dilation: both have the same gate, and their lengths say how many keys dilation adds."""
        keys = {f.name: getattr(self, f.name) for f in dataclasses.fields(CIS)}
        return CIS(**{**keys, "dilate": 0, "radius": 0}), CIS(**keys)

    def decide(self, step: Step, state: State) -> Decision:
        """Return the undilated set with as many random keys as the dilated one has more."""
        plain, dilated = (
            _run(part, step, state, name) for part, name in zip(self._parts, ("plain.", "wide."), strict=True)
        )
        if not isinstance(plain.selection, Selection) or not isinstance(dilated.selection, Selection):
            return plain
        assert plain.retrieved is not None
        held, wide = plain.selection, dilated.selection
        draws = state.get("draws", torch.zeros_like(plain.retrieved, dtype=torch.int64)) + plain.retrieved
        state["draws"] = draws
        more = wide.lengths - held.lengths  # [B, Hs]
        most = int(more.max()) if host.may_look(more.device) else wide.indices.shape[2]
        n = step.columns
        kept = torch.arange(held.indices.shape[2], device=more.device) < held.lengths[..., None]
        columns = torch.where(kept, held.indices.long(), n)  # n: nothing, sorts to the end
        priority = self._priority(step, draws).scatter(2, columns, _LAST)  # [B, Hs, n + 1]
        best = priority.topk(min(most, n), largest=False)
        drawn = (torch.arange(best.indices.shape[2], device=more.device) < more[..., None]) & (best.values < _LAST)
        union = torch.cat([columns, torch.where(drawn, best.indices, n)], 2).sort(-1).values
        lengths = held.lengths + drawn.sum(-1, dtype=torch.int32)
        selection = as_selection(torch.where(union < n, union, -1).to(torch.int32), lengths)
        return dataclasses.replace(plain, selection=selection, copied=False)

    def _priority(self, step: Step, draws: Tensor) -> Tensor:
        """Return int64 ``[B, Hs, n + 1]``, a random number a key, different at every draw; padding and column n come last."""
        device = draws.device
        token = (
            torch.arange(step.columns + 1, device=device) - torch.tensor(step.rows.pad, device=device)[:, None, None]
        )
        head = torch.arange(draws.shape[1], device=device)[:, None]
        x = _mix(
            draws[..., None] + _mix(head + _mix(torch.full_like(head, step.layer + 1) + _mix(head * 0 + self.seed)))
        )
        x = _mix(x + token)
        x = ((x >> _TOKEN_BITS) & ((1 << (62 - _TOKEN_BITS)) - 1)) << _TOKEN_BITS | token.clamp(min=0)  # never equal
        x = torch.where(token < 0, _LAST, x)
        x[..., -1] = _LAST
        return x


def _mix(x: Tensor) -> Tensor:
    """Return the bits of int64 `x` well mixed (the finaliser of splitmix64)."""
    x = x + -0x61C8864680B583EB
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _run(part: CIS, step: Step, state: State, prefix: str) -> Decision:
    """Let `part` decide in its own share of the state."""
    own = State({name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)})
    decision = part.decide(step, own)
    for name in [name for name in state if name.startswith(prefix)]:
        del state[name]
    state.update({prefix + name: value for name, value in own.items()})
    return decision
