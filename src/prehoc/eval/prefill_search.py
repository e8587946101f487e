"""The search that picks prefill settings by the perplexity of a continuation, and the document it is published in."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prehoc.eval.perplexity import Change
from prehoc.eval.prefill_sweep import STARTS, Row, Sweep, both, spell
from prehoc.methods import ETF, PSAW, Dense, parse_method
from prehoc.selection import Method

# most pruning first: the search takes the first value of a coordinate that is good enough
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "psaw": {"start_layer": STARTS, "phi": (0.1, 0.3, 0.5, 0.7), "alpha": (3.0, 1.5, 1.0)},
    "etf": {"start_layer": STARTS, "psi": (0.1, 0.3, 0.5, 0.7), "gamma": (3.0, 1.5, 1.0)},
}
# the paper's own settings, where the search begins
PAPER: dict[str, Method] = {
    "psaw": PSAW(phi=0.7, alpha=1.5, start_layer=0.5),
    "etf": ETF(psi=0.5, gamma=1.0, start_layer=0.5),
}


def run(sweep: Sweep, methods: Sequence[Method], searches: Sequence[str], limit: float) -> dict[str, Any]:
    """Measure dense, the methods and what the searches ask for; return rows and choices as plain numbers.

    Parameters
    ----------
    sweep : Sweep
        Where to measure.
    methods : sequence of Method
        Settings to measure in any case.
    searches : sequence of {"psaw", "etf", "both"}
        Coordinate searches; both runs the two and measures their choices together.
    limit : float
        Largest upper end of the interval of the relative change of continuation perplexity.

    Returns
    -------
    dict
        ``rows``: every setting that the sweep has finished, from earlier runs too; ``chosen``: by search, the method and
        whether it is within the limit.
    """
    for method in (Dense(), *methods):
        sweep.row(method)
    best: dict[str, Method] = {}
    chosen: dict[str, dict[str, Any]] = {}
    for family in [name for name in GRIDS if name in searches or "both" in searches]:
        best[family], good = coordinate_search(sweep.row, PAPER[family], GRIDS[family], limit)
        chosen[family] = {"method": spell(best[family]), "within_limit": good}
    if "both" in searches:
        psaw, etf = best["psaw"], best["etf"]
        assert isinstance(psaw, PSAW) and isinstance(etf, ETF)
        pair = both(psaw, etf)
        chosen["both"] = {"method": spell(pair), "within_limit": sweep.row(pair).continuation.high <= limit}
    return {"chosen": chosen, "rows": [as_dict(sweep.row(parse_method(name))) for name in sweep.finished()]}


def coordinate_search(
    evaluate: Callable[[Method], Row], start: Method, grid: Mapping[str, Sequence[float]], limit: float, rounds: int = 2
) -> tuple[Method, bool]:
    """Return the setting that prunes most with the upper end of its interval within `limit`, one coordinate at a time.

    Each coordinate takes the first value of its grid, ordered from most pruning to least, that is good enough; where none
    is, the last. A setting that prunes at least as much in every coordinate as one that was not good enough is not
    measured. The rounds end when nothing changes.

    Parameters
    ----------
    evaluate : callable
        Measures one setting.
    start : Method
        Where to begin.
    grid : mapping
        Values per coordinate, most pruning first.
    limit : float
        Largest upper end of the interval of the relative change of continuation perplexity.
    rounds : int
        Most passes over all coordinates.

    Returns
    -------
    method : Method
        The setting.
    good : bool
        Whether it is within the limit.
    """
    current, good = start, False
    failed: list[Method] = []

    def good_enough(candidate: Method) -> bool:
        # nothing that prunes at least as much in every coordinate as a failed setting is worth its time
        if any(_prunes_more(candidate, other, grid) for other in failed):
            return False
        if evaluate(candidate).continuation.high <= limit:
            return True
        failed.append(candidate)
        return False

    for _ in range(rounds):
        before = current
        for key, values in grid.items():
            for value in values:
                candidate = dataclasses.replace(current, **{key: value})  # type: ignore[type-var]
                found = good_enough(candidate)
                if found or (not good and value == values[-1]):
                    current, good = candidate, found
                    break
        if current == before:
            break
    return current, good


def _prunes_more(one: Method, other: Method, grid: Mapping[str, Sequence[float]]) -> bool:
    """Whether `one` prunes at least as much as `other` in every coordinate of a grid that is ordered by that."""
    return all(values.index(getattr(one, key)) <= values.index(getattr(other, key)) for key, values in grid.items())


def as_dict(row: Row) -> dict[str, Any]:
    """Return a row as plain numbers, with the NLL of every window: anyone can compute the interval again."""
    found = row.measured
    return {
        "method": spell(row.method),
        "saved": round(row.saved, 5),
        "operations": found.operations,
        "operations_dense": found.operations_dense,
        "continuation": _perplexity(found.continuation_nll, row.continuation),
        "window": None if found.window_nll is None else _perplexity(found.window_nll, row.window),
        "continuation_nll": list(found.continuation_nll),
        "window_nll": None if found.window_nll is None else list(found.window_nll),
        "seconds": round(found.seconds, 1),
    }


def _perplexity(nll: Sequence[float], change: Change | None) -> dict[str, float | None]:
    assert change is not None
    ends = (change.mean, change.low, change.high)
    mean, low, high = (round(end, 6) if math.isfinite(end) else None for end in ends)
    return {"perplexity": round(math.exp(statistics.fmean(nll)), 4), "change": mean, "low": low, "high": high}


def table(run: Mapping[str, Any]) -> str:
    """Return a run's rows as lines of text, those that save most first."""
    lines = [f"{'saved':>7}  {'continuation (95 % interval)':<38}  {'window (95 % interval)':<38}  method"]
    for row in sorted(run["rows"], key=lambda row: -row["saved"]):
        cells = [_cell(row[kind]) for kind in ("continuation", "window")]
        lines.append(f"{row['saved']:7.2%}  {cells[0]:<38}  {cells[1]:<38}  {row['method']}")
    for family, choice in run["chosen"].items():
        lines.append(f"chosen for {family}: {choice['method']}{'' if choice['within_limit'] else ' (over the limit)'}")
    return "\n".join(lines)


def _cell(found: Mapping[str, float | None] | None) -> str:
    if found is None:
        return "-"
    change, low, high = (
        "inf" if end is None else f"{end:+.2%}" for end in (found["change"], found["low"], found["high"])
    )
    return f"{found['perplexity']:.3f} {change} [{low}, {high}]"


def read_document(path: Path) -> dict[str, Any]:
    """Return the document at `path`, an empty one if there is no file.

    Raises
    ------
    ValueError
        When the file holds something else.
    """
    if not path.exists():
        return {"runs": []}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(document["runs"], list):
            return dict(document)
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{path} is not a file of prehoc tune prefill; give another --out")


def add_run(document: dict[str, Any], run: dict[str, Any]) -> None:
    """Put a run in a document, in the place of an earlier one of its name."""
    names = [old["name"] for old in document["runs"]]
    at = names.index(run["name"]) if run["name"] in names else len(names)
    document["runs"][at : at + 1] = [run]
