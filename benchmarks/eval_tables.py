"""The tables of docs/results.md, from the summaries of evaluation runs beside this script and their trends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prehoc.plot import figures_eval
from prehoc.plot.runs import read_run

FOLDER = Path(__file__).resolve().parent


SHOWN = ("oracle", "cis", "cis-8", "hshare-1", "hshare-0", "double_sparsity", "quest", "h2o", "snapkv", "streaming")
"""Rows of the README's table; CIS pays its dilation out of the budget (``matched``), so that all read as many keys."""
SUMMARY = {  # run: column of the README's table, its task's score shown
    "eval_smollm2_ruler": ("needle, SmolLM2", "found"),
    "eval_qwen_ruler": ("needle, Qwen2.5-Coder", "found"),
    "eval_qwen_qasper": ("qasper, Qwen2.5-Coder", "f1"),
}


def accuracy_summary() -> str:
    """Return the README's table: KL to dense with its interval, and the score, of some methods in three runs."""
    from prehoc.methods import parse_method

    budgets = (128, 1024)
    header, lines = [], [["dense"], *([name] for name in SHOWN)]
    for run, (title, metric) in SUMMARY.items():
        document = json.loads((FOLDER / f"{run}.json").read_text())
        (table,) = document["tables"]
        rows = {parse_method(row["method"]): row for row in table["rows"]}
        n = table["rows"][0]["n"]
        header += [f"{title}, n = {n}, {budget} keys" for budget in budgets]
        for line in lines:
            for budget in budgets:
                matched = ",matched=true" if line[0] in ("cis", "cis-8") else ""
                text = "dense" if line[0] == "dense" else f"{line[0]}:budget={budget}{matched}"
                row = rows[parse_method(text)]
                kl = "" if line[0] == "dense" else f", {_interval(row['kl'], 3)}"
                line.append(f"{row['scores'][metric]['mean']:.0f}{kl}")
    out = ["| | " + " | ".join(header) + " |", "|---" * (len(header) + 1) + "|"]
    return "\n".join([*out, *("| `" + line[0] + "` | " + " | ".join(line[1:]) + " |" for line in lines)]) + "\n"


def runs_section() -> str:
    """Return every table of every published run."""
    return "\n".join(run_section(path) for path in sorted(FOLDER.glob("eval_*_*.json")))


def run_section(path: Path) -> str:
    """Return the tables of one run."""
    document = json.loads(path.read_text())
    asked = "question decoded" if document["decode_question"] else "query-aware prefill"
    lines = [f"\n### {document['model']}, {path.stem.split('_', 2)[2]}\n", "```", document["command"], "```", ""]
    for table in document["tables"]:
        head = [f"**{table['task']}**, n = {table['rows'][0]['n']}, {asked}, {document['dtype']}"]
        if table["refused"]:
            lines += [*head, f"refused: {table['refused']}", ""]
            continue
        if table["not_informative"]:
            head.append(
                "**not informative**: dense is at the floor of the task, so only mass and agreement say something"
            )
        metrics = list(table["rows"][0]["scores"])
        columns = [column for metric in metrics for column in (metric, f"{metric} to dense")]
        columns += ["same tokens", "KL", "decoded", "keys", "bytes of dense", "rho", "mass", "beta"]
        lines += ["; ".join(head) + "\n", "| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        lines += [_line(row, metrics) for row in table["rows"]]
        lines += [f"\n{note}" for note in table["notes"]] + [""]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any], metrics: list[str]) -> str:
    cells = []
    for metric in metrics:
        score = row["scores"][metric]
        cells += [_interval(score, 2), _interval(score.get("difference"), 2) if row["method"] != "dense" else ""]
    cells.append("" if row["agreement"] is None else f"{row['agreement']:.2f}")
    cells.append(_interval(row["kl"], 3) if row["method"] != "dense" else "")
    cells.append(str(row["decoded"]))
    cells += [_number(row.get("keys"), "{:.0f}"), _number(row.get("bytes_share"), "{:.0%}")]
    cells.append(_number(row.get("retrieval_ratio"), "{:.3f}"))
    cells += [_interval(row["retained_mass"], 3), _interval(row["beta"], 3)]
    name = f"`{row['method']}`" + (" *covered*" if row["covered"] else "")
    return f"| {name} | " + " | ".join(cells) + " |"


def trends_section() -> str:
    """Return what the paper says should come out, and what did, as the report shows it."""
    lines = []
    for table in figures_eval.trends(read_run(FOLDER / "eval_trends.json")):
        lines += [
            f"\n**{table.caption}** (first minus second)\n",
            "| " + " | ".join(table.header) + " |",
            "|---" * len(table.header) + "|",
        ]
        lines += [f"| `{first}` | `{second}` | " + " | ".join(rest) + " |" for first, second, *rest in table.rows]
    return "\n".join(lines) + "\n"


def _interval(found: dict[str, Any] | None, digits: int) -> str:
    if found is None or found.get("mean") is None:
        return ""
    return f"{found['mean']:.{digits}f} [{found['low']:.{digits}f}, {found['high']:.{digits}f}]"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
