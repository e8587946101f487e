"""The table of a task: every method beside dense, with intervals, or the reason why it must not be printed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from prehoc.eval.results import Line
from prehoc.eval.tasks.base import Metric, Task
from prehoc.mass import mean_interval
from prehoc.methods import describe
from prehoc.report import without_nan
from prehoc.selection import Method

Table = dict[str, Any]


def summarise(task: Task, methods: Sequence[Method], lines: Sequence[Line], *, decode_question: bool) -> Table:
    """Return the rows of a task, ready for JSON (None where there is nothing to say).

    Parameters
    ----------
    task : Task
        The task.
    methods : sequence of Method
        In the order of the rows; dense first.
    lines : sequence of Line
        Their finished lines.
    decode_question : bool
        How the run fed its questions.

    Returns
    -------
    dict
        ``rows``; ``refused``: why the table must not be printed, or None; ``not_informative``: whether dense is at the
        floor; ``notes``.
    """
    by_method: dict[str, dict[str, Line]] = {describe(method): {} for method in methods}
    for line in lines:
        by_method[line["method"]][line["sample"]] = line
    dense = by_method[describe(methods[0])]
    aware = None if not task.new_tokens else not decode_question
    rows = [_row(task, method, by_method, dense, methods, aware) for method in methods]
    table: Table = {
        "task": task.name,
        "rows": rows,
        "refused": _refusal(task, methods, rows, len(dense)),
        "not_informative": False,
        "notes": [],
    }
    if table["refused"] is None:
        _remark(task, table)
    return dict(without_nan(table))


def _row(
    task: Task,
    method: Method,
    by_method: Mapping[str, Mapping[str, Line]],
    dense: Mapping[str, Line],
    methods: Sequence[Method],
    aware: bool | None,
) -> dict[str, Any]:
    own = by_method[describe(method)]
    lines = list(own.values())
    traffic = {
        name: math.fsum(line["traffic"][name] for line in lines) for name in (lines[0]["traffic"] if lines else ())
    }
    plan = method.plan()
    selects = plan.selector is not None or plan.window is not None
    covered = sum(selects and line["traffic"]["keys_read"] == line["traffic"]["keys_visible"] for line in lines)
    decoded = sum(line["decoded"] for line in lines)
    row: dict[str, Any] = {
        "method": describe(method),
        "query_aware": aware,
        "n": len(lines),
        "scores": {metric.name: _score(metric, own, dense) for metric in task.metrics},
        "split": _split(task, lines),
        "decoded": decoded,
        "undecoded_samples": sum(line["decoded"] == 0 for line in lines),
        "selects": selects,
        "covered_samples": covered,
        "covered": bool(lines) and decoded > 0 and covered == len(lines),
        "cut_samples": sum(line["cut_tokens"] > 0 for line in lines),
        "prompt_tokens": _mean([line["prompt_tokens"] for line in lines]),
        "agreement": _mean([line["agreement"] for line in lines]),
        "kl": _interval([line["kl"] for line in lines if line["kl"] is not None]),
        "prefill_seconds": _mean([line["prefill_seconds"] for line in lines]),
        "retained_mass": _masses(lines),
        "beta": _beta(method, methods, by_method),
    }
    operations = math.fsum(line["prefill_operations_dense"] for line in lines)
    row["prefill_share"] = math.fsum(line["prefill_operations"] for line in lines) / operations if operations else None
    return {**row, **_reading(traffic, lines, decoded)}


def _reading(traffic: Mapping[str, float], lines: Sequence[Line], decoded: int) -> dict[str, Any]:
    """Return what the decode steps read, per head and step or per decoded token."""
    if not decoded or not traffic["triples"]:
        return dict.fromkeys(
            ("keys", "keys_visible", "bytes_per_token", "bytes_share", "retrieval_ratio", "seconds_per_token")
        )
    read = traffic["bytes_read"]
    counted = traffic["counted_triples"]
    return {
        "keys": traffic["keys_read"] / traffic["triples"],
        "keys_visible": traffic["keys_visible"] / traffic["triples"],
        "bytes_per_token": read / decoded,
        "bytes_share": read / traffic["bytes_dense"],
        "retrieval_ratio": traffic["retrievals"] / counted if counted else None,
        "seconds_per_token": math.fsum(line["seconds"] for line in lines) / decoded,
    }


def _score(metric: Metric, own: Mapping[str, Line], dense: Mapping[str, Line]) -> dict[str, Any]:
    """Return mean and 95 % interval in shown units, and the paired difference to dense.

    Of perplexities the difference is relative: exp(mean difference in nats) - 1, in percent.
    """
    values = {name: line["scores"][metric.name] for name, line in own.items()}
    if not values or None in values.values():
        return {"mean": None, "low": None, "high": None, "difference": None}
    found: dict[str, Any] = _shown(metric, list(values.values()))
    pairs = [value - dense[name]["scores"][metric.name] for name, value in values.items() if name in dense]
    if metric.form == "perplexity":
        steps = [100 * math.expm1(value) for value in mean_interval(pairs)] if pairs else []
    else:
        steps = [100 * value for value in mean_interval(pairs)] if pairs else []
    found["difference"] = dict(zip(("mean", "low", "high"), steps, strict=False)) or None
    return found


def _split(task: Task, lines: Sequence[Line]) -> dict[str, dict[str, Any]]:
    """Return the first metric, its interval and n for each value of the tag that splits the task."""
    if task.split is None:
        return {}
    metric, by_value = task.metrics[0], dict[str, list[float]]()
    for line in lines:
        if (value := line["tags"].get(task.split)) is not None:
            by_value.setdefault(str(value), []).append(line["scores"][metric.name])
    return {value: _shown(metric, scores) | {"n": len(scores)} for value, scores in sorted(by_value.items())}


def _shown(metric: Metric, values: Sequence[float]) -> dict[str, float]:
    """Return mean and 95 % interval in shown units."""
    shown = [math.exp(x) if metric.form == "perplexity" else 100 * x for x in mean_interval(values)]
    return dict(zip(("mean", "low", "high"), shown, strict=True))


def _interval(values: Sequence[float]) -> dict[str, float] | None:
    return dict(zip(("mean", "low", "high"), mean_interval(values), strict=True)) if values else None


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _masses(lines: Sequence[Line]) -> dict[str, Any] | None:
    """Return the mean over samples of their audited masses with its interval, and n audited triples."""
    interval = _interval([line["retained_mass"] for line in lines if line["audited"]])
    return None if interval is None else {**interval, "n": sum(line["audited"] for line in lines)}


def _beta(
    method: Method, methods: Sequence[Method], by_method: Mapping[str, Mapping[str, Line]]
) -> dict[str, float] | None:
    """Return the audited mass of the oracle of the same size minus the method's own, paired by sample."""
    size = _size(method)
    oracle = next((one for one in methods if one.name == "oracle" and _size(one) == size), None)
    if size is None or oracle is None or method.name == "oracle":
        return None
    theirs, ours = (
        {name: line["retained_mass"] for name, line in by_method[describe(one)].items() if line["audited"]}
        for one in (oracle, method)
    )
    return _interval([theirs[name] - mass for name, mass in ours.items() if name in theirs])


def _size(method: Method) -> tuple[Any, ...] | None:
    size = getattr(method, "size", None)
    if size is None or method.plan().selector is None:
        return None
    budget = size()
    return budget.total, budget.ratio, budget.critical, budget.mass


def _refusal(task: Task, methods: Sequence[Method], rows: Sequence[Mapping[str, Any]], samples: int) -> str | None:
    """Return why a table must not be printed."""
    if not samples:
        return "there is no dense row to compare with"
    for row in rows:
        if row["n"] != samples:
            return f"{row['method']} has {row['n']} samples and dense {samples}; run it again to finish"
    for metric in task.metrics:
        mean, (low, high) = rows[0]["scores"][metric.name]["mean"], metric.plausible
        if mean is not None and not low <= mean <= high:
            return (
                f"dense has {metric.name} {mean:.2f}, outside the plausible range {low:g} to {high:g}: look at the outputs, "
                "the chat template, the stop texts and the truncation"
            )
    for row in rows:
        if row["selects"] and not row["decoded"]:
            return (
                f"no token was decoded under {row['method']}: every answer ended with the first token, which comes from the "
                "prefill; add --decode-question"
            )
    return None


def _remark(task: Task, table: Table) -> None:
    metric, dense = task.metrics[0], table["rows"][0]["scores"][task.metrics[0].name]
    low = dense["mean"] if math.isnan(dense["low"]) else dense["low"]
    if metric.form == "percent" and low <= metric.floor:
        table["not_informative"] = True
        table["notes"].append(
            f"not informative: dense's {metric.name} reaches the floor of {metric.floor:g}, so that no method can lose anything"
        )
    tried = [row for row in table["rows"][1:] if row["selects"] and not row["covered"]]
    if tried and all(row["agreement"] == 1 for row in tried):
        table["notes"].append("every method gave dense's own answers, token by token")
    if cut := table["rows"][0]["cut_samples"]:
        table["notes"].append(f"{cut} of {table['rows'][0]['n']} documents lost their middle to fit")
