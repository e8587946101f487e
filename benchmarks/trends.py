"""Paired differences between methods of the same size in evaluation runs: what the paper says should come out, with intervals.

python benchmarks/trends.py RUN... > benchmarks/eval_trends.json

RUN are folders of `prehoc eval`. Scores, KL to dense and retained mass are paired by sample.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from prehoc.mass import mean_interval
from prehoc.methods import parse_method

PAIRS = (  # first minus second; what the paper says of it, and of the gate on scores we
    ("cis-8:matched=true", "hshare-1", "CIS-8 keeps more mass than HShare-1 at equal keys"),
    ("cis-16:matched=true", "hshare_matched", "CIS-16 keeps more mass than the HShare of Table VI at equal keys"),
    ("cis-16:matched=true", "hshare-0", "CIS-16 keeps more mass than HShare-0 at equal keys"),
    ("cis-8:matched=true", "direct_reuse", "dilation pays for the critical keys that it takes the place of"),
    ("cis-8", "random_expansion", "neighbours are better than random keys"),
    ("cis-8:matched=true", "cis_key:matched=true", "queries are a better gate than keys"),
    ("cis-8:matched=true", "cis_hidden:matched=true", "queries are a better gate than hidden states"),
    (
        "cis-8:matched=true,gate=score,tau=0.5",
        "cis-8:matched=true,tau=0.8",
        "scores are a better gate than queries, at fewer retrievals",
    ),
    (
        "cis-8:matched=true,gate=score,tau=0.4",
        "hshare-1",
        "gated by scores at tau 0.4, CIS is closer to dense than HShare-1, at fewer retrievals",
    ),
    ("cis:matched=true", "cis-8:matched=true", "at one tau scores are the better gate, at more retrievals"),
    ("cis:matched=true", "hshare-1", "CIS at its defaults is closer to dense than HShare-1 at equal keys"),
    ("cis-8:matched=true", "cis-8:matched=true,tau=-1", "without a gate quality breaks"),
    (
        "cis-8:matched=true,dilate=0,radius=0,tau=-1",
        "cis-8:matched=true,tau=-1",
        "(without a gate) dilation does not break it",
    ),
    ("cis-8:matched=true", "quest", "exact retrieval, shared, against page bounds"),
    ("cis-8:matched=true", "double_sparsity", "exact retrieval, shared, against label channels"),
    ("cis-8:matched=true", "h2o", "selection against eviction"),
    ("cis-8:matched=true", "snapkv", "selection against eviction"),
)


def main() -> None:
    rows = [row for folder in sys.argv[1:] for row in trends(Path(folder))]
    json.dump(
        {"benchmark": "trends", "command": "python benchmarks/trends.py RUN...", "rows": rows}, sys.stdout, indent=1
    )
    print()


def trends(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of one run."""
    summary = json.loads((folder / "summary.json").read_text())
    found = []
    for table in summary["tables"]:
        if table["refused"]:
            continue
        covered = {row["method"] for row in table["rows"] if row["covered"]}
        ratios = {row["method"]: row["retrieval_ratio"] for row in table["rows"]}
        lines = [json.loads(line) for line in (folder / f"{table['task']}.jsonl").read_text().splitlines()]
        by_method: dict[str, list[dict[str, Any]]] = {}
        for line in lines:
            by_method.setdefault(line["method"], []).append(line)
        for budget in (64, 128, 256, 512, 1024):
            for one, other, claim in PAIRS:
                names = [_find(name, budget, by_method) for name in (one, other)]
                if None in names or covered & set(names):
                    continue
                first, second = (by_method[str(name)] for name in names)
                row = {
                    "run": folder.name,
                    "model": summary["model"],
                    "task": table["task"],
                    "budget": budget,
                    "claim": claim,
                    "retrieval_ratios": [ratios[str(name)] for name in names],
                }
                found.append(row | {"first": names[0], "second": names[1], **_differences(first, second)})
    return found


def _find(text: str, budget: int, known: dict[str, Any]) -> str | None:
    """Return the name under which a run has the method with that budget."""
    name, _, keys = text.partition(":")
    wanted = parse_method(f"{name}:budget={budget}" + (f",{keys}" if keys else ""))
    for one in known:
        try:
            if parse_method(one) == wanted:
                return one
        except ValueError:
            continue
    return None


def _differences(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> dict[str, Any]:
    """Return mean paired differences with their intervals and n."""
    out: dict[str, Any] = {}
    theirs = {line["sample"]: line for line in second}
    for metric in first[0]["scores"]:
        pairs = [
            line["scores"][metric] - theirs[line["sample"]]["scores"][metric]
            for line in first
            if line["sample"] in theirs and line["scores"][metric] is not None
        ]
        if any(pairs):  # the prefill of decode methods is the same
            out[f"score_{metric}"] = _interval(pairs)
    divergences = [
        line["kl"] - theirs[line["sample"]]["kl"]
        for line in first
        if line["kl"] is not None and theirs.get(line["sample"], {}).get("kl") is not None
    ]
    if divergences:
        out["kl"] = _interval(divergences)
    masses = [
        line["retained_mass"] - theirs[line["sample"]]["retained_mass"]
        for line in first
        if line["audited"] and theirs.get(line["sample"], {}).get("audited")
    ]
    if masses:
        out["mass"] = _interval(masses)
    return out


def _interval(pairs: list[float]) -> dict[str, Any]:
    mean, low, high = mean_interval(pairs)
    return {"mean": mean, "low": low, "high": high, "n": len(pairs)}


if __name__ == "__main__":
    main()
