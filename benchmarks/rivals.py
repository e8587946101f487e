"""Measure the rivals on a real model: what each reads and what it misses, with dense and oracle rows beside them.

Every method chooses on the same queries and keys, those of the dense model, decoding the text's own tokens. One row is a method
at a budget; n is the number of (window, layer, head) means behind an interval.

    prehoc tune double-sparsity --text-file other.txt --prompt-tokens 512 --steps 64 --out channels.json
    python benchmarks/rivals.py --text-file book.txt --budgets 128,256 --out benchmarks/rivals_smollm2.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from prehoc import models, provenance
from prehoc.eval.windows import cut_windows, read_texts
from prehoc.mass import mean_interval
from prehoc.methods import parse_method
from prehoc.replay import replay
from prehoc.trace import Trace, trace

ROWS = (
    "oracle",
    "streaming",
    "cis:tau=0.5,gate=query",  # the gate is stated: a default that changes later must not change what a row means
    "direct_reuse:tau=0.5",
    "random_expansion:tau=0.5",
    "quest",
    "double_sparsity",
    "double_sparsity:channels=4",
    "double_sparsity:channels=16",
    "double_sparsity:calibration=channels.json",
)
DEPTH_ROWS = ("psaw", "static_window", "linear_window")  # without a budget
PROMPT_ROWS = (
    "h2o",
    "snapkv",
    "hshare-1",
    "hshare-2",
    "hshare_matched",
)  # these look at the prompt's queries or at other layers, which a replay has not


def measures(found: Trace) -> dict[str, Any]:
    """Return means over the steps for each (layer, head): the steps of one head are not independent of each other."""
    values = {
        "retained": found.retained,
        "beta": found.oracle - found.retained,
        "beta_equal_keys": found.oracle_equal_keys - found.retained,
        "overlap": found.overlap,
        "keys": found.keys,
        "retrieved": found.retrieved,
    }
    decode = found.meta["totals"]["decode"]
    means = {name: value.mean(0, dtype=np.float64).ravel().tolist() for name, value in values.items()}
    return {**means, "bytes": [decode["bytes_read"], decode["bytes_dense"]]}


def row(name: str, budget: int | None, windows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return plain numbers of one method: means with 95 % bootstrap intervals over windows, layers and heads."""
    out: dict[str, Any] = {"method": name, "budget": budget, "n": sum(len(w["keys"]) for w in windows)}
    for measure in ("retained", "beta", "beta_equal_keys", "overlap", "keys", "retrieved"):
        mean, low, high = mean_interval(np.concatenate([w[measure] for w in windows]))
        out[measure] = [None if np.isnan(x) else round(float(x), 5) for x in (mean, low, high)]
    read, dense = (sum(w["bytes"][i] for w in windows) for i in (0, 1))
    return {**out, "bytes_share": round(read / dense, 4)}


def table(rows: list[dict[str, Any]], budget: int) -> str:
    """Return the rows of one budget, dense first, as a Markdown table."""
    lines = [
        "| method | retrieval ratio | keys | bytes of dense | retained mass (95 %) | beta | beta at equal keys | overlap |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        if one["budget"] in (budget, None):
            mean, low, high = one["retained"]
            rest = [f"{one[m][0]:.4f}" for m in ("beta", "beta_equal_keys")]
            overlap = "-" if one["overlap"][0] is None else f"{one['overlap'][0]:.3f}"
            lines.append(
                f"| `{one['method']}` | {one['retrieved'][0]:.3f} | {one['keys'][0]:.0f} | {one['bytes_share']:.1%} "
                f"| {mean:.4f} [{low:.4f}, {high:.4f}] | {' | '.join(rest)} | {overlap} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text-file", type=Path, action="append", required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--budgets", default="128,512")
    parser.add_argument("--methods", default="", help="only these, separated by spaces")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    budgets = [int(part) for part in given.budgets.split(",")]
    names = given.methods.split() or [*DEPTH_ROWS, *ROWS, *PROMPT_ROWS]
    depth = [name for name in names if name.partition(":")[0] in DEPTH_ROWS]
    labels: dict[tuple[str, int | None], Any] = {(name, None): parse_method(name) for name in depth}
    for budget in budgets:
        labels |= {(name, budget): parse_method(name, {"budget": budget}) for name in names if name not in depth}
    texts = read_texts(given.text_file, len(given.text_file))
    model, tokenizer = models.load(given.model, dtype="float32")
    cut = cut_windows(tokenizer, texts, len(texts), given.prompt_tokens + given.steps)
    found: dict[tuple[str, int | None], list[dict[str, Any]]] = {}
    for ids in cut.tokens:
        seen = trace(model, ids, given.prompt_tokens, given.steps, "dense", observe=True, record=("qk",))
        found.setdefault(("dense", None), []).append(measures(seen))
        light = {
            str(key): method
            for key, method in labels.items()
            if key[0].partition(":")[0] not in PROMPT_ROWS and not method.plan().reads_hidden
        }
        traces = replay(seen, light, backend=seen.meta["backend"])
        for key, method in labels.items():
            one = traces.get(str(key)) or trace(model, ids, given.prompt_tokens, given.steps, method, observe=True)
            found.setdefault(key, []).append(measures(one))
        print(f"{len(found['dense', None])} of {len(cut.tokens)} windows", file=sys.stderr)
    rows = [row(name, budget, windows) for (name, budget), windows in found.items()]
    facts = {
        "command": provenance.command(),
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "model": provenance.hide_folders(given.model),
        "texts": cut.texts,
        "places": cut.places,
        "prompt_tokens": given.prompt_tokens,
        "steps": given.steps,
    }
    given.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    for budget in budgets:
        print(f"budget {budget}\n{table(rows, budget)}\n")


if __name__ == "__main__":
    main()
