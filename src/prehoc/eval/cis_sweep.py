"""What each key of CIS does: many settings over the same recorded queries and keys, beside oracle, streaming and dense."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from prehoc.config import check_int, unknown
from prehoc.mass import mean_interval
from prehoc.methods import CIS, Dense, Oracle, Streaming, describe, every_key, parse_method
from prehoc.replay import replay
from prehoc.selection import Method
from prehoc.trace import Trace, check_request, full_layers, position_limit, trace

MEASURES = ("retained", "oracle", "beta", "beta_equal_keys", "overlap", "keys", "retrieval_ratio")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of the sweep.

    Attributes
    ----------
    label : str
        What differs from the defaults.
    varies : str
        The key that is varied, ``reference`` for the methods beside CIS.
    budget : int or None
        Keys of sink, critical and local together; None: every key.
    method : Method
        The configuration.
    """

    label: str
    varies: str
    budget: int | None
    method: Method


def identity(row: Setting) -> dict[str, Any]:
    """Return what makes a setting."""
    return {"label": row.label, **every_key(row.method)}


def settings(budgets: Sequence[int], vary: Sequence[str] = (), method: str = "cis") -> list[Setting]:
    """Return the settings of the sweep: CIS as it is given, each key varied alone, pairs of s and tau, and references.

    Parameters
    ----------
    budgets : sequence of int
        Keys per head.
    vary : sequence of str
        Keep only the settings that vary one of these (`Setting.varies`); defaults and references always stay.
    method : str
        CIS with the keys that all its settings share, such as ``cis:gate=query``.

    Raises
    ------
    ValueError
        For a name in `vary` that no setting varies, and for a method that is not CIS or has a size of its own.
    """
    rows = [Setting("dense", "reference", None, Dense())]
    every = {"block_size": 1, "dilate": 0}
    compact = {f"compact, rerank={n}": {"retrieval": "compact", "rerank": n} for n in (0, 1, 2)}
    for budget in budgets:
        base = parse_method(method, {"budget": budget})
        if type(base) is not CIS:
            raise ValueError(f"method={method!r} is not CIS, whose keys are varied; give for example cis:gate=query")
        other = "query" if base.gate == "score" else "score"
        critical = budget - base.sink - base.local
        rows += [
            Setting("oracle", "reference", budget, Oracle(budget=budget)),
            Setting("streaming", "reference", budget, Streaming(budget=budget)),
            Setting("defaults", "none", budget, base),
        ]
        changes: list[tuple[str, str, dict[str, Any]]] = [
            *((f"s={s}", "block_size", {"block_size": s}) for s in (2, 4, 16, 32)),
            *((f"tau={tau}", "tau", {"tau": tau}) for tau in (0.4, 0.5, 0.7, 0.8, 0.9)),
            *((f"gate={other}, tau={tau}", "gate", {"gate": other, "tau": tau}) for tau in (0.4, 0.5, 0.6, 0.7, 0.8)),
            *((f"s={s}, no gate", "no gate", {"block_size": s, "tau": -1.0}) for s in (2, 4, 8)),
            ("m=0", "dilate", {"dilate": 0}),
            ("m=k/6", "dilate", {"dilate": critical // 6}),
            ("m=k", "dilate", {"dilate": critical}),
            ("r=2", "radius", {"radius": 2}),
            ("query_head", "granularity", {"granularity": "query_head"}),
            ("query_head, tau=0.8", "granularity", {"granularity": "query_head", "tau": 0.8}),
            ("block refresh", "refresh", {"refresh": "block"}),
            ("sliding local", "local_window", {"local_window": "sliding"}),
            ("matched", "matched", {"matched": True}),
            (
                "s=1, m=0",
                "retrieval",
                every,
            ),  # beside its overlap that of the next is a copy's recall of the exact best
            *((f"s=1, m=0, {label}", "retrieval", {**every, **keys}) for label, keys in compact.items()),
            *((label, "retrieval", keys) for label, keys in compact.items()),
            *((f"s={s}, tau=0.8", "s and tau", {"block_size": s, "tau": 0.8}) for s in (4, 16)),
        ]
        rows += [
            Setting(label, varies, budget, dataclasses.replace(base, **change)) for label, varies, change in changes
        ]
    known = dict.fromkeys(row.varies for row in rows)
    for name in vary:
        if name not in known:
            raise unknown("varied key", name, tuple(known))
    return [row for row in rows if not vary or row.varies in (*vary, "none", "reference")]


def run(
    model: nn.Module,
    windows: Tensor,
    prompt_tokens: int,
    steps: int,
    rows: Sequence[Setting],
    layers: Sequence[int] | None,
    part: Path,
    request: str,
    progress: Callable[[str, int, int], None],
    backend: str | None = None,
) -> list[dict[str, Any]]:
    """Record each window once, replay every setting over it, and return one row of plain numbers per setting.

    Parameters
    ----------
    model : Module
        A supported transformers model in eval mode.
    windows : Tensor
        int64 ``[n, P + S]``.
    prompt_tokens, steps : int
        P and S.
    rows : sequence of Setting
        What to measure.
    layers : sequence of int or None
        The layers to replay; None: all.
    part : Path
        Where finished windows are kept until the run is whole.
    request : str
        What identifies this run, the windows in their order included: only windows of the same run are taken from
        `part`.
    progress : callable
        Called as ``progress(stage, done, total)``.
    backend : str, optional
        Kernel backend.
    """
    check_request(position_limit(model.config), windows.shape[1], prompt_tokens, steps)
    done = _finished(part, request)
    for number, ids in enumerate(windows):
        if number in done:
            continue

        def report(stage: str, step: int, total: int, number: int = number) -> None:
            progress(f"window {number + 1} of {len(windows)}: {stage}", step, total)

        record = ("qk",)
        found = trace(
            model, ids, prompt_tokens, steps, "dense", observe=True, record=record, backend=backend, progress=report
        )
        methods = {str(i): row.method for i, row in enumerate(rows)}
        results = replay(found, methods, layers=layers, backend=found.meta["backend"], progress=report)
        done[number] = [_clusters(results[name]) for name in methods]
        with part.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"request": request, "window": number, "rows": done[number]}) + "\n")
    return [_row(row, [done[number][i] for number in range(len(windows))]) for i, row in enumerate(rows)]


def _finished(part: Path, request: str) -> dict[int, list[dict[str, Any]]]:
    done = {}
    for line in part.read_text(encoding="utf-8").splitlines() if part.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:  # cut off by an interruption
            continue
        if entry["request"] == request:
            done[entry["window"]] = entry["rows"]
    return done


def _clusters(found: Trace) -> dict[str, Any]:
    """Return the means over the steps of each (layer, head): the steps of one head are not independent of each other."""
    layers = found.meta["replayed_layers"]
    traffic = found.meta["totals"]["decode"]
    counted = found.counted[:, layers]
    values: dict[str, NDArray[Any]] = {
        "retained": found.retained,
        "oracle": found.oracle,
        "beta": found.oracle - found.retained,
        "beta_equal_keys": found.oracle_equal_keys - found.retained,
        "overlap": found.overlap,
        "keys": found.keys,
    }
    out: dict[str, Any] = {
        name: [round(x, 6) for x in value[:, layers].mean(0, dtype=np.float64).ravel().tolist()]
        for name, value in values.items()
    }
    ratio = found.retrieved[:, layers].mean(0).ravel().tolist() if counted.all() else []
    return {**out, "retrieval_ratio": ratio, "bytes": [traffic["bytes_read"], traffic["bytes_dense"]]}


def _row(setting: Setting, windows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "label": setting.label,
        "varies": setting.varies,
        "budget": setting.budget,
        "method": describe(setting.method),
        "n": sum(len(found["keys"]) for found in windows),
    }
    for name in MEASURES:
        values = np.concatenate([found[name] for found in windows])
        mean, low, high = mean_interval(values) if np.isfinite(values).all() else (math.nan,) * 3
        row[name] = {"mean": _plain(mean), "low": _plain(low), "high": _plain(high)}
    read, dense = (sum(found["bytes"][i] for found in windows) for i in (0, 1))
    row["bytes_share"] = round(read / dense, 5)
    row["by_window"] = [
        {name: _plain(float(np.mean(found[name]))) if found[name] else None for name in MEASURES} for found in windows
    ]
    return row


def _plain(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def choose_layers(kinds: Sequence[str], stride: int) -> list[int]:
    """Return every `stride`-th of the full-attention layers; ValueError when there is none."""
    check_int("layer_stride", stride, 1)
    return full_layers(kinds)[::stride]


def table(rows: Sequence[Mapping[str, Any]], budget: int | None) -> str:
    """Return a Markdown table of the rows of one budget, dense first."""
    lines = [
        "| setting | retrieval ratio | keys | bytes of dense | retained mass | oracle "
        "| beta (95 %) | beta at equal keys | overlap |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["budget"] not in (budget, None):
            continue
        beta = row["beta"]
        interval = "" if beta["low"] is None else f" [{beta['low']:.4f}, {beta['high']:.4f}]"
        cells = [
            row["label"],
            _cell(row["retrieval_ratio"], 3),
            _cell(row["keys"], 0),
            f"{row['bytes_share']:.1%}",
            _cell(row["retained"], 4),
            _cell(row["oracle"], 4),
            _cell(beta, 4) + interval,
            _cell(row["beta_equal_keys"], 4),
            _cell(row["overlap"], 3),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(value: Mapping[str, float | None], digits: int) -> str:
    mean = value["mean"]
    return "-" if mean is None else f"{mean:.{digits}f}"


def bytes_at_equal_mass(
    rows: Sequence[Mapping[str, Any]], labels: Sequence[str], reference: str
) -> list[tuple[float, dict[str, float | None]]]:
    """Return what each setting reads, as a share of dense, when its budget is chosen to retain what `reference` retains.

    Between two measured budgets the bytes are interpolated linearly in the retained mass; as the mass grows ever more slowly
    with the budget, that overstates the bytes. None where the mass lies outside the measured budgets.

    Parameters
    ----------
    rows : sequence of mapping
        Rows of one sweep over several budgets.
    labels : sequence of str
        Settings to compare.
    reference : str
        The setting whose mass at each budget is to be met.

    Returns
    -------
    list of (float, dict)
        For each budget of `reference`, in order: the retained mass, and label to share of the bytes of dense attention.
    """
    curves = {
        label: sorted(
            (row["retained"]["mean"], row["bytes_share"]) for row in rows if row["label"] == label and row["budget"]
        )
        for label in (*labels, reference)
    }
    out = []
    for mass, _ in curves[reference]:
        found: dict[str, float | None] = {}
        for label in labels:
            masses, shares = zip(*curves[label], strict=True)
            inside = masses[0] <= mass <= masses[-1]
            found[label] = float(np.interp(mass, masses, shares)) if inside else None
        out.append((mass, found))
    return out
