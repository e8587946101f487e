"""Quest: pages of keys with channel-wise bounds; a query reads the pages whose keys could score highest."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from prehoc import kernels
from prehoc.config import Budget, check_choice, check_int
from prehoc.kernels.reference import ranked
from prehoc.methods._scores import grouped_queries, per_head
from prehoc.selection import Decision, Plan, Selection, State, Step

SPARE = 64  # pages of bounds that are allocated ahead


@dataclasses.dataclass(frozen=True)
class Quest:
    """Read whole pages: those with the largest upper bound on q.k, which follows from each page's channel-wise bounds.

    Source: arXiv 2406.10774. A page is `page_size` consecutive tokens of a row, counted from its first real token; the page
    that holds the newest key is always read.

    Parameters
    ----------
    budget, ratio, critical
        The size, as in `prehoc.config.Budget`, rounded down to whole pages; ratio 1/8, at least 256 keys, when none is given.
    sink, local : int
        First and last keys whose pages are always read.
    page_size : int
        Keys of a page.
    dense_layers : int
        Leading layers that read every key.
    granularity : {"kv_head", "query_head"}
        One set of pages per KV head or per query head.

    Raises
    ------
    ValueError
        When the sizes contradict each other or leave no page to choose.
    """

    name: ClassVar[str] = "quest"

    budget: int | None = None
    ratio: float | None = None
    critical: int | None = None
    sink: int = 0
    local: int = 1
    page_size: int = 16
    dense_layers: int = 2
    granularity: Literal["kv_head", "query_head"] = "kv_head"

    def __post_init__(self) -> None:
        self.size()
        check_int("page_size", self.page_size, 1)
        check_int("dense_layers", self.dense_layers, 0)
        check_choice("granularity", self.granularity, ("kv_head", "query_head"))
        least = (self._always + 1) * self.page_size
        stated = self.budget if self.critical is None else self.sink + self.critical + self.local
        if stated is not None and stated < least:
            raise ValueError(
                f"{stated} keys are too few: {self._always} of their pages of {self.page_size} are always read; "
                f"give at least {least}, or a smaller page_size"
            )

    @property
    def _always(self) -> int:
        """Pages that are read whatever their score: sinks, and local keys wherever a page begins."""
        return -(-self.sink // self.page_size) + 1 + -(-(self.local - 1) // self.page_size)

    @functools.cached_property
    def _size(self) -> Budget:
        return Budget.of(self.budget, self.ratio, self.critical, None, self.sink, self.local)

    def size(self) -> Budget:
        """Return the budget."""
        return self._size

    def plan(self) -> Plan:
        """Return a plan whose selector is this configuration."""
        return Plan(selector=self)

    def decide(self, step: Step, state: State) -> Decision:
        """Return the keys of the best pages; every key in the first layers and where the pages cover the row."""
        if step.layer < self.dense_layers:
            return Decision(None)
        b, h, d = step.q.shape
        hs = step.k.shape[1] if self.granularity == "kv_head" else h
        tokens = [step.columns - pad for pad in step.rows.pad]
        pages = [-(-t // self.page_size) for t in tokens]
        allowed = [self._pages(prompt) for prompt in step.rows.prompt]
        counted = tuple(have > may for have, may in zip(pages, allowed, strict=True))
        if not any(counted):
            return Decision(None, counted=counted, heads=hs)
        fresh = step.columns - 1 if "bounds" in state else 0  # each key is read once, to go into its bounds
        self._bound(step, state, pages)
        taken = [min(have, may) for have, may in zip(pages, allowed, strict=True)]
        best = self._best(step, state, pages, tokens, taken)  # [B, Hs, max(taken)], ascending, the spare page behind
        device = step.q.device
        columns = best[..., None] * self.page_size + torch.arange(self.page_size, device=device)  # in the row's tokens
        columns = columns.flatten(2)
        limit = _rows(tokens, device)
        indices = torch.where(columns < limit, columns + _rows(step.rows.pad, device), -1)
        # whole pages, the newest excepted, which is always there and comes last
        read = [(many - 1) * self.page_size + t - (have - 1) * self.page_size
                for many, have, t in zip(taken, pages, tokens, strict=True)]  # fmt: skip
        lengths = _rows(read, device).view(-1, 1).expand(b, hs).to(torch.int32).contiguous()
        indices = indices[..., : max(read)].to(torch.int32).contiguous()
        summaries = 2 * sum(pages) * step.k.shape[1] * d * step.k.element_size() + step.key_bytes(fresh)
        selection = Selection(indices, lengths, full=len(set(read)) == 1)
        return Decision(selection, counted=counted, heads=hs, summaries=summaries)

    def _pages(self, prompt: int) -> int:
        """Return how many pages a row with this prompt may read."""
        budget = self.size()
        keys = budget.sink + (budget.critical_for(prompt) or 0) + budget.local
        return max(keys // self.page_size, self._always + 1)

    def _bound(self, step: Step, state: State, pages: list[int]) -> None:
        """Keep each page's largest and least value of every channel side by side, ``[B, Hkv, pages, 2 D]``."""
        most = max(pages)
        if "bounds" not in state:
            b, hkv, _, d = step.k.shape
            state["bounds"] = step.k.new_zeros((b, hkv, most + SPARE, 2 * d))
            alike = len(set(step.rows.pad)) == 1
            parts = [slice(0, b)] if alike else [slice(i, i + 1) for i in range(b)]
            for part, pad in zip(parts, step.rows.pad, strict=False):
                found = _bounds(step.k[part, :, pad:], self.page_size)
                state["bounds"][part, :, : found.shape[2]] = found
            return
        if most > state["bounds"].shape[2]:
            state["bounds"] = F.pad(state["bounds"], (0, 0, 0, SPARE))
        newest = step.k[:, :, -1]  # [B, Hkv, D]
        device = newest.device
        row, page = torch.arange(len(pages), device=device), torch.tensor(pages, device=device) - 1
        begins = [(step.columns - 1 - pad) % self.page_size == 0 for pad in step.rows.pad]
        first = torch.tensor(begins, device=device).view(-1, 1, 1)
        high, low = state["bounds"][row, :, page].chunk(2, -1)
        merged = torch.cat([torch.maximum(high, newest), torch.minimum(low, newest)], -1)
        state["bounds"][row, :, page] = torch.where(first, torch.cat([newest, newest], -1), merged)

    def _best(self, step: Step, state: State, pages: list[int], tokens: list[int], taken: list[int]) -> Tensor:
        """Return int64 ``[B, Hs, max(taken)]``: each row's pages to read, ascending; a page too far fills up short rows."""
        most, device = max(pages), step.q.device
        bounds = state["bounds"][:, :, :most]
        q = torch.cat(
            [step.q.clamp(min=0), step.q.clamp(max=0)], -1
        )  # [B, H, 2 D]: its product with a page is the bound
        sinks = -(-self.sink // self.page_size)
        last = [(t - self.local) // self.page_size for t in tokens]
        if len(set(tokens)) == 1:  # an exact retrieval, over the pages
            b, hs = q.shape[0], bounds.shape[1] if self.granularity == "kv_head" else q.shape[1]
            local = most - last[0]
            found = kernels.get(step.backend, device).retrieve(
                q, bounds, None, hs, (0,) * b, (sinks,) * b, sinks, local, taken[0] - sinks - local, step.scale
            )
            page = torch.arange(most, device=device)
            always = torch.cat([page[:sinks], page[last[0] :]]).expand(b, hs, -1)
            return torch.cat([always, found.order.view(b, hs, -1)], -1).sort(-1).values
        grouped = grouped_queries(dataclasses.replace(step, q=q))  # [B, Hkv, G, 2 D]
        page, have = torch.arange(most, device=device), _rows(pages, device)
        bound = (grouped @ bounds.to(grouped.dtype).mT).masked_fill((page >= have)[:, None], -torch.inf)
        score = per_head(bound, self.granularity).float()  # [B, Hs, pages]
        always = ((page >= _rows(last, device)) | (page < sinks)) & (page < have)
        score = score.masked_fill(always, torch.inf)
        chosen = ranked(score.flatten(0, 1), max(taken)).view(*score.shape[:2], -1)
        if len(set(taken)) > 1:
            chosen = torch.where(torch.arange(max(taken), device=device) < _rows(taken, device), chosen, most)
        return chosen.sort(-1).values


def _rows(values: list[int] | tuple[int, ...], device: torch.device) -> Tensor:
    """Return one number a row as int64 ``[B, 1, 1]``, or ``[1, 1, 1]`` when all rows agree."""
    values = values[:1] if len(set(values)) == 1 else values
    return torch.tensor(values, device=device).view(-1, 1, 1)


def _bounds(k: Tensor, size: int) -> Tensor:
    """Return the largest and the least key of every page of ``[B, Hkv, t, D]``, channel by channel, ``[B, Hkv, pages, 2 D]``."""
    b, hkv, t, d = k.shape
    whole = t // size
    paged = k[:, :, : whole * size].reshape(b, hkv, whole, size, d)
    bounds = [torch.cat([paged.amax(3), paged.amin(3)], -1)]
    if t % size:
        rest = k[:, :, whole * size :]
        bounds.append(torch.cat([rest.amax(2, keepdim=True), rest.amin(2, keepdim=True)], -1))
    return torch.cat(bounds, 2)
