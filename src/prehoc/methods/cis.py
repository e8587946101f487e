"""CIS, clustered indices sharing: an anchor query retrieves its top-k, similar queries that follow reuse the set."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from prehoc import kernels
from prehoc.config import DEFAULT_LOCAL, DEFAULT_SINK, Budget, check_bool, check_choice, check_int, check_range
from prehoc.kernels import host
from prehoc.methods import _gate, _gathered, _native, _sets
from prehoc.methods._cheap import SCALE_BYTES, codes_of
from prehoc.methods._retrieval import Middle, as_selection, cover, retrieve_lists
from prehoc.selection import Decision, Plan, State, Step


@dataclasses.dataclass(frozen=True)
class CIS:
    """Share the dilated exact top-k of an anchor query with the next queries of its block while they stay similar.

    Source: the PrHS paper (CIS, CIS* with ``matched``); design decisions 1 to 4.

    Parameters
    ----------
    budget, ratio, critical, mass
        The size, as in `prehoc.config.Budget`; ratio 1/8, at least 256 keys, when none is given.
    sink, local : int
        First and last keys that are always read.
    block_size : int
        s: a retrieval serves at most s steps, its own included.
    tau : float
        A head shares while the least cosine of its query heads with their anchors exceeds this, in [-1, 1].
    gate : {"score", "query", "key", "hidden"}
        What has that cosine: the scores that the head's queries give the prompt's keys (their correlation, in the keys' leading
        principal axes); the queries (the paper's gate, and that of ``cis-8``, ``cis-16`` and their like); or, for comparison
        (Table IX), its newest key after the rotary embedding or the hidden state that enters the layer.
    dilate : int, optional
        m, the best keys whose neighbours are added; None: critical // 3 per head.
    radius : int
        r, neighbours on each side.
    refresh : {"rolling", "block"}
        A failing head becomes its own new anchor, or retrieves for that step only (the paper's reading).
    local_window : {"frozen", "sliding"}
        Whether local keys stay while a set is shared, or fall out (the paper's reading).
    granularity : {"kv_head", "query_head"}
        One set per KV head or per query head.
    matched : bool
        CIS*: pay the dilation out of the budget.
    retrieval : {"exact", "compact"}
        A retrieval scores every key, or an int8 copy of every key and then the best ``rerank * critical`` keys exactly.
    rerank : int
        See `retrieval`; 0: the copy decides alone.

    Raises
    ------
    ValueError
        When a value lies outside its range or the sizes contradict each other.
    """

    name: ClassVar[str] = "cis"

    budget: int | None = None
    ratio: float | None = None
    critical: int | None = None
    mass: float | None = None
    sink: int = DEFAULT_SINK
    local: int = DEFAULT_LOCAL
    block_size: int = 8
    tau: float = 0.6
    gate: Literal["score", "query", "key", "hidden"] = "score"
    dilate: int | None = None
    radius: int = 1
    refresh: Literal["rolling", "block"] = "rolling"
    local_window: Literal["frozen", "sliding"] = "frozen"
    granularity: Literal["kv_head", "query_head"] = "kv_head"
    matched: bool = False
    retrieval: Literal["exact", "compact"] = "exact"
    rerank: int = 2

    def __post_init__(self) -> None:
        self.size()
        check_int("block_size", self.block_size, 1)
        check_range("tau", self.tau, -1.0, 1.0, fix="it is a cosine; the paper uses 0.8")
        check_choice("gate", self.gate, _gate.GATES)
        check_int("dilate", self.dilate, 0, optional=True)
        check_int("radius", self.radius, 0)
        check_bool("matched", self.matched)
        check_choice("refresh", self.refresh, ("rolling", "block"))
        check_choice("local_window", self.local_window, ("frozen", "sliding"))
        check_choice("granularity", self.granularity, ("kv_head", "query_head"))
        check_choice("retrieval", self.retrieval, ("exact", "compact"))
        check_int("rerank", self.rerank, 0)
        if self.retrieval == "exact" and self.rerank != CIS.rerank:
            raise ValueError(
                f"rerank={self.rerank} is for retrieval=compact: an exact retrieval ranks every key already"
            )
        if self.retrieval == "compact" and self.mass is not None:
            raise ValueError(
                "mass= needs the exact weights of the keys: give budget, ratio or critical, or retrieval=exact"
            )
        if self.matched and self.size().critical_for(1) is None:
            raise ValueError("matched=true needs a stated total: give budget, ratio or critical")
        if self.matched and self.budget is not None and self.budget < self.sink + self.local + self._growth + 1:
            raise ValueError(
                f"budget={self.budget} leaves no critical key when matched: sink {self.sink} + local {self.local} + "
                f"{self._growth} steps of frozen window; give at least {self.sink + self.local + self._growth + 1}"
            )

    @property
    def reads_hidden(self) -> bool:
        """Whether `decide` needs `Step.hidden`."""
        return self.gate == "hidden"

    @property
    def _growth(self) -> int:
        """Keys that a frozen window gains before its block ends."""
        return self.block_size - 1 if self.local_window == "frozen" else 0

    @functools.cached_property
    def _size(self) -> Budget:
        return Budget.of(self.budget, self.ratio, self.critical, self.mass, self.sink, self.local)

    def size(self) -> Budget:
        """Return the budget."""
        return self._size  # asked for by every layer at every step

    def plan(self) -> Plan:
        """Return a plan whose selector is this configuration."""
        return Plan(selector=self)

    def decide(self, step: Step, state: State) -> Decision:
        """Return the keys to read: shared where the gate allows, retrieved elsewhere, all where the budget covers them."""
        middle = Middle.of(step, self.size(), self.granularity)
        if not any(middle.counted):
            number = state.get("step", -1) + 1  # blocks are counted from the first decode step, covered or not
            state.clear()
            state["step"] = number
            return Decision(None, counted=middle.counted, heads=middle.heads)
        sampled = 0  # bytes of the keys that axes were found in
        if self.gate == "score" and "axes" not in state:
            state["axes"] = _gate.axes(step, self.sink)
            sampled = min(_gate.SAMPLE * step.k[:, :, 0].nbytes, step.key_bytes(0))
        native = _native.find(self, kernels.get(step.backend, step.q.device), middle)
        if native is not None:
            decision, coded = _native.decide(self, native, step, state, middle, self._growth)
        else:
            decision, coded = self._decide(step, state, middle)
        decision.anchors, decision.summaries = _sets.read_by_the_gate(state), coded + sampled
        if self.retrieval == "compact":
            width = step.q.shape[2] + SCALE_BYTES
            decision.compact = tuple((keys - self.sink) * width for keys in middle.scored)
            pairs = zip(middle.scored, middle.critical, strict=True)
            decision.scored = tuple(min(self.rerank * critical, keys) + self.sink for keys, critical in pairs)
        return decision

    def _decide(self, step: Step, state: State, middle: Middle) -> tuple[Decision, int]:
        """Decide with the operations of any backend; return the decision and the bytes of keys that were coded."""
        hs, device, exact = middle.heads, step.q.device, self.retrieval == "exact"
        look = host.may_look(device)
        unit = _gate.compared(self.gate, step, state.get("axes"))
        boundary, anchored = self._advance(step, state), "anchor" in state
        if anchored:
            cosine = _gate.cosines(unit, state["anchor"], hs)
            need = ~(cosine > self.tau) | (state["age"] < 0)
            if self.refresh == "rolling":
                need |= state["age"] >= self.block_size
            elif boundary:
                need = torch.ones_like(need)
        else:
            cosine = torch.full((unit.shape[0], hs), torch.nan, device=device)
            need = torch.ones_like(cosine, dtype=torch.bool)
        if not all(middle.counted):
            need &= torch.tensor(middle.counted, device=device)[:, None]
        today, coded, copies = None, 0, look and self._keeps_copies(step)
        if not look or bool(need.any()):  # where the host may not look, all heads retrieve and the mask decides
            chosen = None if not look or bool(need.all()) else need.flatten().nonzero()[:, 0]
            reserve = self._growth if self.matched else None
            coded = 0 if exact else step.key_bytes(state.get("coded", 0))
            codes = None if exact else codes_of(state, step)
            lists = retrieve_lists(
                step, middle, chosen, self.size(), self.dilate, self.radius, reserve, codes=codes, rerank=self.rerank
            )
            today = self._store(step, state, lists, unit, need, chosen, boundary)
            if copies:
                _gathered.refill(state, step, chosen, lists[0])
        indices, lengths = today or (state["indices"], state["lengths"])
        if not all(middle.counted):
            state["age"].masked_fill_(~torch.tensor(middle.counted, device=device)[:, None], -1)
            indices, lengths = cover(indices, lengths, step, middle, self.sink)
        selection = as_selection(indices, lengths)
        if "keys" in state and all(middle.counted):
            longest = selection.indices.shape[2]
            selection.keys, selection.values = state["keys"][:, :, :longest], state["values"][:, :, :longest]
        decision = Decision(
            selection,
            need,
            cosine,
            middle.counted,
            middle.scored,
            scores_all=not look,
            heads=hs,
            copied=copies,
        )
        return decision, coded

    def _keeps_copies(self, step: Step) -> bool:
        """Return whether the selected rows are worth copying: lists that only grow, and kernels that would gather them."""
        grows = self.refresh == "rolling" and self.local_window == "frozen"
        return grows and not kernels.get(step.backend, step.q.device).READS_IN_PLACE

    def _advance(self, step: Step, state: State) -> bool:
        """Let every stored list follow the newest token; return whether a block of ``refresh="block"`` starts."""
        state["step"] = state.get("step", -1) + 1
        if "indices" in state:
            indices, lengths = state["indices"], state["lengths"]
            state["age"] += state["age"] >= 0
            if self.local_window == "frozen":  # append; a list past its block is replaced below, so it may overwrite
                last = indices.shape[2] - 1
                slots = lengths.long().clamp(max=last)[..., None]
                indices.scatter_(2, slots, step.columns - 1)
                lengths.add_(1).clamp_(max=last + 1)
                if "keys" in state:
                    _gathered.append(state, step, slots)
            else:  # the last `local` entries are consecutive columns: all move on by one
                at = torch.arange(indices.shape[2], device=indices.device)
                indices += (at < lengths[..., None]) & (at >= lengths[..., None] - self.local)
        return bool(state["step"] % self.block_size == 0)

    def _store(
        self,
        step: Step,
        state: State,
        lists: tuple[Tensor, Tensor],
        unit: Tensor,
        need: Tensor,
        chosen: Tensor | None,
        boundary: bool,
    ) -> tuple[Tensor, Tensor] | None:
        """Make new lists the block's sets; return the lists of this step alone where they differ (``refresh="block"``)."""
        indices, lengths = lists
        room = self._growth + 1  # one more than a block appends: the step that ends it writes before it is replaced
        _sets.reserve(state, unit.shape, unit.device, need.shape[1], indices.shape[1] + room)
        indices = F.pad(indices, (0, state["indices"].shape[2] - indices.shape[1]), value=-1)
        # where the host looked, the chosen heads are those in need, and nothing has to be masked
        store, today = None if host.may_look(need.device) else need, None
        if self.refresh == "block" and not boundary:
            today = (state["indices"].clone(), state["lengths"].clone())
            _sets.put(today[0], chosen, indices, store)
            _sets.put(today[1], chosen, lengths, store)
            store = need & (state["age"] < 0)  # a head without a set takes this one
        _sets.put(state["indices"], chosen, indices, store)
        _sets.put(state["lengths"], chosen, lengths, store)
        fresh = need if store is None else store
        _gate.keep(state["anchor"], unit, fresh)
        state["age"].masked_fill_(fresh, 0)
        return today
