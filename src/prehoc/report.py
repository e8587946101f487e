"""What a session read and what it missed, as numbers and as text."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

from prehoc import mass
from prehoc.books import Books, Prefill, Traffic

FEW = 10  # audited triples below which a bootstrap interval is too narrow to print


@dataclasses.dataclass(frozen=True)
class Report:
    """The account of one session (design decisions 7 and 8).

    Attributes
    ----------
    method : str
        The method with its keys.
    budget : str
        The budget in tokens and ratio.
    decode : Traffic
        Keys and bytes of the decode steps.
    prefill : Prefill
        Work of the prompts.
    audited : int
        Number of audited triples.
    retained_mass : tuple of float
        Audited mean retained mass with the ends of its 95 % bootstrap interval; NaN when nothing was audited. One minus it
        is the total variation between the sparse and the dense attention distribution.
    seconds_per_step : float
        Median wall time of a decode step's forward; NaN without any.
    cache_bytes : int
        Bytes that the last cache holds: keys and values with their spare capacity, and the selection state.
    """

    method: str
    budget: str
    decode: Traffic
    prefill: Prefill
    audited: int
    retained_mass: tuple[float, float, float]
    seconds_per_step: float
    cache_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers; what cannot be computed is None."""
        out = dataclasses.asdict(self)
        out["decode"] = self.decode.to_dict()
        mean, low, high = self.retained_mass
        out["retained_mass"] = {"mean": mean, "low": low, "high": high}
        out["total_variation"] = {"mean": 1 - mean, "low": 1 - high, "high": 1 - low}
        cleaned = without_nan(out)
        assert isinstance(cleaned, dict)
        return cleaned

    def __str__(self) -> str:
        d, p = self.decode, self.prefill
        lines = [f"method           {self.method}"]
        if self.budget:
            lines.append(f"budget           {self.budget}")
        if p.operations_dense:
            saved = 1 - p.operations / p.operations_dense
            lines.append(
                f"prefill          {p.tokens} tokens, {p.operations / 1e9:.1f} of {p.operations_dense / 1e9:.1f} G operations "
                f"({saved:.1%} saved), {p.seconds:.2f} s"
            )
        if d.triples:
            lines += self._decode_lines()
        return "\n".join(lines)

    def _decode_lines(self) -> list[str]:
        d = self.decode
        exact = d.triples - d.counted_triples
        lines = [
            f"decode           {d.steps} steps, {self.seconds_per_step * 1e3:.1f} ms per step (median)",
            f"keys read        {d.keys_read / d.triples:.1f} of {d.keys_visible / d.triples:.1f} per head and step "
            f"({d.keys_read / d.keys_visible:.1%})",
            f"bytes read       {d.bytes_read / 1e6:.1f} of {d.bytes_dense / 1e6:.1f} MB dense "
            f"({d.bytes_read / d.bytes_dense:.1%}): scored {d.bytes_scored / 1e6:.1f}, "
            f"compact copy {d.bytes_compact / 1e6:.1f}, copied {d.bytes_copied / 1e6:.1f}, "
            f"keys and values {d.bytes_processed / 1e6:.1f}, indices {d.bytes_indices / 1e6:.1f}, "
            f"anchors {d.bytes_anchors / 1e6:.1f}",
        ]
        if d.bytes_read > d.bytes_dense:
            lines.append(
                "                 that is more than dense reads: the budget is close to the text's length, or there is a set per "
                "query head"
            )
        held = f"{self.cache_bytes / 1e6:.1f} MB: keys, values, spare capacity and selection state"
        lines.append(f"bytes held       {held}")
        if d.counted_triples:
            lines.append(
                f"retrieval ratio  {d.retrieval_ratio:.3f} of {d.counted_triples} triples "
                f"({exact} apart: {d.covered_triples} covered, {d.dense_triples} dense, "
                f"{d.window_triples} window, {d.sliding_triples} sliding)"
            )
        mean, low, high = self.retained_mass
        if self.audited >= FEW:
            lines.append(
                f"retained mass    {mean:.4f} [{low:.4f}, {high:.4f}] audited, n = {self.audited}, 95 % interval"
            )
            lines.append(f"total variation  {1 - mean:.4f} [{1 - high:.4f}, {1 - low:.4f}]")
        elif self.audited:
            lines.append(
                f"retained mass    {mean:.4f} audited, n = {self.audited}: too few for an interval; raise audit (--audit)"
            )
            lines.append(f"total variation  {1 - mean:.4f}")
        elif d.counted_triples:
            lines.append(
                "retained mass    not audited: no triple was drawn, or its keys were evicted; raise audit=, decode more steps, "
                "or use prehoc trace"
            )
        return lines


def make_report(method: str, budget: str, books: Books, seed: int, cache_bytes: int) -> Report:
    """Close the books into a report."""
    books.flush()
    samples = books.audited().tolist()
    seconds = statistics.median(books.decode_seconds) if books.decode_seconds else math.nan
    return Report(
        method,
        budget,
        dataclasses.replace(books.traffic),
        dataclasses.replace(books.prefill),
        len(samples),
        mass.mean_interval(samples, seed=seed),
        seconds,
        cache_bytes,
    )


def without_nan(value: Any) -> Any:
    """Return plain data with NaN as None: JSON has no NaN."""
    if isinstance(value, dict):
        return {k: without_nan(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value
