"""The books: what was read against what dense attention would have read. A retrieval never disappears from them."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
from torch import Tensor

from prehoc.kernels.host import wait
from prehoc.selection import Decision, Rows, Selection, Step, Window


@dataclasses.dataclass
class Traffic:
    """Keys and bytes of the decode steps; the parts of the bytes add up to `bytes_read` (design decision 8)."""

    steps: int = 0
    triples: int = 0
    dense_triples: int = 0
    window_triples: int = 0
    sliding_triples: int = 0
    covered_triples: int = 0
    counted_triples: int = 0
    retrievals: int = 0
    keys_read: int = 0
    keys_visible: int = 0
    bytes_scored: int = 0
    bytes_compact: int = 0
    bytes_processed: int = 0
    bytes_copied: int = 0
    bytes_indices: int = 0
    bytes_anchors: int = 0
    bytes_dense: int = 0

    @property
    def bytes_read(self) -> int:
        """Bytes of the cache, of indices, anchors and axes that decode attention and selection read."""
        scored = self.bytes_scored + self.bytes_compact
        return scored + self.bytes_copied + self.bytes_processed + self.bytes_indices + self.bytes_anchors

    @property
    def retrieval_ratio(self) -> float:
        """Retrievals per (row, step, layer, head) whose middle was larger than the critical keys; NaN if there was none."""
        return self.retrievals / self.counted_triples if self.counted_triples else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """Return all counts with the two derived ones."""
        return {
            **dataclasses.asdict(self),
            "bytes_read": self.bytes_read,
            "retrieval_ratio": self.retrieval_ratio,
        }


@dataclasses.dataclass
class Prefill:
    """Work of the prompts: rows that layers processed, query-key pairs, and operations, against dense."""

    forwards: int = 0
    tokens: int = 0
    rows: int = 0
    rows_dense: int = 0
    pairs: int = 0
    pairs_dense: int = 0
    operations: int = 0
    operations_dense: int = 0
    seconds: float = 0.0


@dataclasses.dataclass
class _Pending:
    """One layer of one step whose counts still lie on the device."""

    lengths: Tensor  # int32 [B, Hs]
    retrieved: Tensor  # bool [B, Hs]
    copied: bool
    scored: tuple[int, ...]  # per row, keys scored by a retrieval; empty: booked already
    compact: tuple[int, ...]  # per row, bytes of the compact copy read by a retrieval; empty: none, or booked already
    key_bytes: int
    pair_bytes: int


class Books:
    """Counts of one session; device tensors are kept aside and read in bulk, so that a step never waits for the device."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.prefill = Prefill()
        self.decode_seconds: list[float] = []
        self._pending: list[_Pending] = []
        self._audits: list[Tensor] = []
        self.audited_rows: list[int] = []  # the batch row of each, as it was numbered in that step

    def decision(self, step: Step, v_dim: int, decision: Decision) -> None:
        """Enter one layer of one decode step; keys are counted per selection head, dense bytes per KV head."""
        t = self.traffic
        b, _, d = step.q.shape
        hkv, n = step.k.shape[1], step.columns
        size = step.k.element_size()
        pair = (d + v_dim) * size
        held = sum(n - pad for pad in step.rows.pad)
        visible = held + sum(decision.evicted)
        t.bytes_dense += visible * hkv * pair
        t.bytes_scored += decision.summaries
        chosen = decision.selection
        if not isinstance(chosen, Selection):
            keys = held
            if isinstance(chosen, Window):
                keys = sum(window_keys(n, p, s, chosen.sink) for p, s in zip(step.rows.pad, chosen.start, strict=True))
            heads = decision.heads or hkv
            t.triples += b * heads
            t.keys_visible += visible * heads
            t.keys_read += keys * heads
            t.bytes_processed += keys * hkv * pair  # one read of a key serves its whole group
            if decision.counted:
                counted = sum(decision.counted)
                t.counted_triples += counted * heads
                t.covered_triples += (b - counted) * heads
            else:
                t.dense_triples += b * heads * (chosen is None)
                t.window_triples += b * heads * (chosen is not None)
            return
        hs = chosen.lengths.shape[1]
        counted = sum(decision.counted)
        t.triples += b * hs
        t.keys_visible += visible * hs
        t.counted_triples += counted * hs
        t.covered_triples += (b - counted) * hs
        t.bytes_anchors += decision.anchors
        retrieved = decision.retrieved
        if retrieved is None:
            retrieved = torch.zeros_like(chosen.lengths, dtype=torch.bool)
        scored, compact = decision.scored, decision.compact
        if decision.scores_all:
            t.bytes_scored += hs * sum(scored) * d * size
            t.bytes_compact += hs * sum(compact)
            scored = compact = ()
        lengths = chosen.lengths.clone()  # the selector goes on writing to its own
        self._pending.append(_Pending(lengths, retrieved, decision.copied, scored, compact, d * size, pair))
        if len(self._pending) >= 256:
            self.flush()

    def sliding(self, k: Tensor, v_dim: int, first: tuple[int, ...]) -> None:
        """Enter a sliding-window layer of one decode step: exact attention over each row's real keys, counted apart."""
        b, hkv, n, d = k.shape
        keys = sum(n - begin for begin in first) * hkv
        self.traffic.triples += b * hkv
        self.traffic.sliding_triples += b * hkv
        self.traffic.keys_read += keys
        self.traffic.keys_visible += keys
        self.traffic.bytes_processed += keys * (d + v_dim) * k.element_size()
        self.traffic.bytes_dense += keys * (d + v_dim) * k.element_size()

    def prompt(self, rows: Rows, past: int, tokens: int, weights: tuple[tuple[int, int], ...]) -> None:
        """Enter the linear layers of a prompt's forward in full; `skip` takes back what freezing saves."""
        p, columns = self.prefill, tokens * len(rows.pad)
        p.forwards += 1
        p.tokens += sum(past + tokens - max(pad, past) for pad in rows.pad if pad < past + tokens)
        p.rows += columns * len(weights)
        p.rows_dense += columns * len(weights)
        operations = 2 * columns * sum(layer for layer, _ in weights)
        p.operations += operations
        p.operations_dense += operations

    def skip(self, rows: int, weights: int) -> None:
        """Take back `rows` rows that a layer did not process; `weights` of its matrix weights were not used."""
        self.prefill.rows -= rows
        self.prefill.operations -= 2 * rows * weights

    def attended(self, pairs: int, dense: int, heads: int, dim: int) -> None:
        """Enter a layer's query-key pairs of a prompt, done and dense (two products of 2 D operations a pair and head)."""
        p = self.prefill
        p.pairs += pairs
        p.pairs_dense += dense
        p.operations += 4 * pairs * heads * dim
        p.operations_dense += 4 * dense * heads * dim

    def audit(self, row: int, mass: Tensor) -> None:
        """Keep the audited retained mass (a float32 scalar) of one triple of a batch row."""
        self._audits.append(mass)
        self.audited_rows.append(row)

    def flush(self) -> None:
        """Read the device counts that are still pending."""
        t = self.traffic
        if not self._pending:
            return
        alike: dict[tuple[torch.device, torch.Size], list[_Pending]] = {}  # layers may lie on several devices
        for entry in self._pending:
            alike.setdefault((entry.lengths.device, entry.lengths.shape), []).append(entry)
        for entries in alike.values():
            lengths = torch.stack([entry.lengths for entry in entries])  # [n, B, Hs]
            retrieved = torch.stack([entry.retrieved for entry in entries])
            counts = torch.stack([lengths, retrieved, lengths * retrieved]).sum(3)  # [3, n, B]
            for entry, keys, hits, both in zip(entries, *counts.tolist(), strict=True):  # the one read of a device
                t.keys_read += sum(keys)
                t.bytes_processed += sum(keys) * entry.pair_bytes
                t.bytes_copied += sum(both) * entry.pair_bytes * entry.copied
                t.bytes_indices += sum(keys) * 4
                t.retrievals += sum(hits)
                t.bytes_scored += sum(h * many for h, many in zip(hits, entry.scored, strict=False)) * entry.key_bytes
                t.bytes_compact += sum(h * many for h, many in zip(hits, entry.compact, strict=False))
        self._pending.clear()

    def audited(self) -> Tensor:
        """Return the audited retained masses so far, float32 ``[n]`` on the CPU."""
        return torch.stack([a.cpu() for a in self._audits]) if self._audits else torch.empty(0)


def window_keys(columns: int, pad: int, start: int, sink: int) -> int:
    """Return how many keys a row reads whose window begins at column `start`."""
    return columns - pad if start <= pad + sink else sink + columns - start


class Stopwatch:
    """Adds up the time of named parts of a step; None in place of one costs nothing."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device
        self._last = 0.0

    def start(self) -> None:
        """Begin timing."""
        self._last = self._now()

    def lap(self, part: str) -> None:
        """Book the time since the last call on `part`."""
        now = self._now()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def _now(self) -> float:
        wait(self._device)
        return time.perf_counter()


def as_dict(books: Books) -> dict[str, Any]:
    """Return traffic and prefill as plain numbers."""
    books.flush()
    return {"decode": books.traffic.to_dict(), "prefill": dataclasses.asdict(books.prefill)}
