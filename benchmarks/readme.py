"""Write what README and docs show of measurements, from the committed JSON files beside this script: picture and tables.

prehoc demo --json > benchmarks/demo.json
python benchmarks/readme.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_tables
import eval_tables

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "img" / "dense_and_cpe.png"
BLUE, ORANGE = "#0072b2", "#e69f00"  # of a palette that is told apart without colour vision; hatches tell it twice
PARTS = (("bytes_processed", "keys and values", ""), ("bytes_scored", "scored by retrievals", "///"))
SMALL = ("bytes_copied", "bytes_indices", "bytes_anchors")


def main() -> None:
    demo = json.loads((ROOT / "benchmarks" / "demo.json").read_text())
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    draw(demo)
    for path in DOCUMENTS:
        path.write_text(fill(path, path.read_text(encoding="utf-8")), encoding="utf-8")


def fill(path: Path, text: str) -> str:
    """Return a document's text with the parts between its markers written anew."""
    for name, section in DOCUMENTS[path].items():
        pattern = rf"(<!-- {name}: [^\n]* -->\n).*?(<!-- /{name} -->)"
        text, found = re.subn(pattern, lambda m, c=section(): m[1] + c + m[2], text, count=1, flags=re.S)
        if not found:
            raise ValueError(f"{path.name} has no place for {name!r}")
    return text


def demo_section() -> str:
    """Return what one run of the demo read and missed, in counts that do not depend on the machine's speed."""
    demo = json.loads((ROOT / "benchmarks" / "demo.json").read_text())
    dense, cpe = demo["answers"]
    read, books = cpe["report"]["decode"], cpe["report"]["prefill"]
    mass = cpe["report"]["retained_mass"]
    lines = [
        "One run of `make demo`, in counts that do not depend on the machine's speed"
        f" ({demo['prompt_tokens']} tokens of prompt, {len(cpe['tokens'])} written, SmolLM2-135M-Instruct, float32;"
        " [data and command](benchmarks/demo.json)):\n",
        f"| | dense | `{cpe['method']}` |",
        "|---|---|---|",
        f"| keys read per head and step | {_keys(dense):.0f} | {_keys(cpe):.0f} |",
        f"| bytes read per step | {_bytes(dense):.1f} MB | {_bytes(cpe):.1f} MB |",
        f"| retrieval ratio | | {read['retrieval_ratio']:.3f} |",
        f"| retained mass, audited | 1 | {mass['mean']:.4f} (95 % interval {mass['low']:.4f} to {mass['high']:.4f},"
        f" n = {cpe['report']['audited']}) |",
        f"| operations of the prefill | {books['operations_dense'] / 1e12:.2f} T | {books['operations'] / 1e12:.2f} T |",
        f"| tokens before the answers differ | | {demo['tokens_in_common']} of {len(cpe['tokens'])} |",
    ]
    return "\n".join(lines) + "\n"


def _keys(answer: dict[str, Any]) -> float:
    decode = answer["report"]["decode"]
    return float(decode["keys_read"] / decode["triples"])


def _bytes(answer: dict[str, Any]) -> float:
    decode = answer["report"]["decode"]
    return float(decode["bytes_read"] / decode["steps"] / 1e6)


def sweep_section() -> str:
    """Return the sweep of CIS, a table a budget; nothing before it was measured."""
    path = ROOT / "benchmarks" / "tune_cis_smollm2.json"
    if not path.exists():
        return ""
    document = json.loads(path.read_text())
    intro, tables = _sweep(path)
    taus = {tau: "defaults" if tau == "0.6" else f"tau={tau}" for tau in ("0.4", "0.5", "0.6", "0.7", "0.8", "0.9")}
    gates = {"no gate": "s=8, no gate", **{f"tau {tau}": label for tau, label in taus.items()}}
    return intro + "\n".join(_at_equal_mass(document, gates)) + "\n" + tables


def _sweep(path: Path) -> tuple[str, str]:
    """Return what a sweep measured in words, and its tables, one a budget."""
    from prehoc.eval.cis_sweep import table
    from prehoc.plot.cis import varied

    document = json.loads(path.read_text())
    base = next(row for row in document["rows"] if row["varies"] == "none")
    intro = (
        f"Measured on {document['model']}: {document['prompt_tokens']} tokens of prompt, {document['steps']} decoded, every"
        " setting on the same recorded queries and keys. beta is the oracle's retained mass less the setting's. Each row"
        f" changes one thing from `{varied(base)}` ([data and command](../../benchmarks/{path.name})).\n"
    )
    tables = (f"\n{budget} keys:\n\n{table(document['rows'], budget)}\n" for budget in document["budgets"])
    return intro, "".join(tables)


def compact_section() -> str:
    """Return what retrievals by the compact copy find, lose and read, a model after the other."""
    paths = sorted((ROOT / "benchmarks").glob("tune_compact_*.json"))
    return "\n".join("".join(_sweep(path)) for path in paths)


def _at_equal_mass(document: dict[str, Any], gates: dict[str, str]) -> list[str]:
    """Return a table of what each gate reads when its budget is chosen to retain what ``tau=0.8`` retains."""
    from prehoc.eval.cis_sweep import bytes_at_equal_mass

    name = next(name for name, label in gates.items() if label == "tau=0.8")
    lines = [
        "\nBytes of dense attention at equal mass: for each gate the budget is chosen so that it retains what"
        f" {name} retains at {', '.join(map(str, document['budgets'][:-1]))} keys (interpolated between the measured"
        " budgets).\n",
        "| retained mass | " + " | ".join(gates) + " |",
        "|---" * (len(gates) + 1) + "|",
    ]
    for mass, shares in bytes_at_equal_mass(document["rows"], list(gates.values()), "tau=0.8")[:-1]:
        cells = [f"{mass:.4f}", *("-" if share is None else f"{share:.1%}" for share in shares.values())]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def score_gate_section() -> str:
    """Return the gates on queries and on scores beside each other, a model a table."""
    queries = {f"query {tau}": "defaults" if tau == "0.6" else f"tau={tau}" for tau in ("0.5", "0.6", "0.7", "0.8")}
    gates = {**queries, **{f"score {tau}": f"gate=score, tau={tau}" for tau in ("0.4", "0.5", "0.6", "0.7", "0.8")}}
    measures: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
        ("retrieval ratio", lambda row: f"{row['retrieval_ratio']['mean']:.2f}"),
        ("bytes of dense", lambda row: f"{row['bytes_share']:.1%}"),
        ("retained mass", lambda row: f"{row['retained']['mean']:.4f}"),
    )
    lines: list[str] = []
    for path in sorted((ROOT / "benchmarks").glob("tune_gate_*.json")):
        document = json.loads(path.read_text())
        budget = document["budgets"][0]
        rows = {row["label"]: row for row in document["rows"] if row["budget"] == budget}
        texts = ", ".join(text["file"] for text in document["texts"])
        lines += [
            f"\n{document['model']}, {document['prompt_tokens']} tokens of prompt and {document['steps']} decoded of {texts}, "
            f"{len(document['layers'])} layers, n = {rows['oracle']['n']} "
            f"([data and command](../../benchmarks/{path.name})), at {budget} keys (oracle "
            f"{rows['oracle']['retained']['mean']:.4f}):\n",
            "| | " + " | ".join(gates) + " |",
            "|---" * (len(gates) + 1) + "|",
            *(
                f"| {name} | " + " | ".join(text(rows[label]) for label in gates.values()) + " |"
                for name, text in measures
            ),
            *_at_equal_mass(document, gates),
        ]
    return "\n".join(lines) + "\n"


def passkey_section() -> str:
    """Return what the gates find in a retrieval task: share of bytes, retained mass and passkeys found."""
    taus = ("0.5", "0.6", "0.7", "0.8", "0.9")
    first = ("dense", "oracle:budget=64", "oracle:budget=128")
    return _passkeys("passkey_gate_smollm2.json", first, ",gate=query", taus, "0.5")


def score_passkey_section() -> str:
    """Return the same of the gate on scores, that on queries beside it."""
    queries = (f"cis:budget={budget},gate=query" for budget in (64, 128, 256))
    first = ("dense", "oracle:budget=64", "oracle:budget=128", *queries)
    return _passkeys(
        "passkey_score_gate_smollm2.json", first, ",gate=score", ("0.4", "0.5", "0.6", "0.7", "0.8"), "0.6"
    )


def _passkeys(name: str, first: tuple[str, ...], gate: str, taus: tuple[str, ...], default: str) -> str:
    def parts(method: str) -> frozenset[str]:
        unsaid = "" if "tau=" in method or not method.startswith("cis") else f",tau={default}"  # when it was measured
        return frozenset((method + unsaid).replace(":", ",").split(","))

    document = json.loads((ROOT / "benchmarks" / name).read_text())
    rows = {parts(row["method"]): row for row in document["tables"][0]["rows"]}
    shown = [*first, *(f"cis:budget={budget},tau={tau}{gate}" for budget in (64, 128, 256) for tau in taus)]
    lines = [
        f"Five digits hidden in {document['length']} tokens of noise and asked for in decode steps, {document['model']}, n ="
        f" {rows[parts('dense')]['n']} ([data and command](../../benchmarks/{name})):\n",
        "| | bytes of dense | retained mass | found (95 %) |",
        "|---|---|---|---|",
    ]
    for method in shown:
        row = rows[parts(method)]
        found, mass = row["scores"]["found"], row["retained_mass"]
        kept = "1" if mass is None else f"{mass['mean']:.3f}"
        score = f"{found['mean']:.0f} % [{found['low']:.0f}, {found['high']:.0f}]"
        lines.append(f"| `{method}` | {row['bytes_share']:.0%} | {kept} | {score} |")
    return "\n".join(lines) + "\n"


def draw(demo: dict[str, Any]) -> None:
    """Draw keys and bytes per step, and the retained mass, of dense and CPE."""
    from matplotlib.figure import Figure

    dense, cpe = demo["answers"]
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    keys, traffic, mass = figure.subplots(1, 3, width_ratios=(1, 1.5, 0.9))
    names = ("dense", "CPE")

    bars = keys.bar(names, (_keys(dense), _keys(cpe)), color=(BLUE, ORANGE), edgecolor="black", width=0.6)
    keys.bar_label(bars, fmt="%.0f")
    keys.set(title="keys read\nper head and step", ylim=(0, _keys(dense) * 1.12))

    below = [0.0, 0.0]
    for part, label, hatch in (*PARTS, ("small", "copies, indices, gate", "...")):
        values = [_part(answer, part) for answer in (dense, cpe)]
        traffic.bar(names, values, bottom=below, color=(BLUE, ORANGE), edgecolor="black", hatch=hatch, width=0.6)
        if values[1] > 0.04 * _bytes(dense):
            traffic.annotate(label, (1.34, below[1] + values[1] / 2), va="center", fontsize=9)
        elif values[1]:
            traffic.annotate(label, (1.34, below[1] + values[1]), va="bottom", fontsize=9)
        below = [a + b for a, b in zip(below, values, strict=True)]
    for i, total in enumerate(below):
        traffic.annotate(f"{total:.0f}", (i, total), ha="center", va="bottom")
    traffic.set(title="MB read per step\n", xlim=(-0.5, 3.0), ylim=(0, below[0] * 1.12), xticks=(0, 1))

    found = cpe["report"]["retained_mass"]
    error = ([found["mean"] - found["low"]], [found["high"] - found["mean"]])
    mass.axhline(1.0, color=BLUE, linewidth=2)
    mass.annotate("dense", (0.45, 1.0), va="bottom", ha="right", color=BLUE)
    mass.errorbar([0], [found["mean"]], yerr=error, fmt="s", color=ORANGE, ecolor="black", capsize=5, markersize=8)
    mass.annotate(f"  CPE {found['mean']:.3f}", (0.04, found["mean"]), va="center")
    mass.set(
        title=f"attention mass retained\naudit, n = {cpe['report']['audited']}, 95 %",
        xlim=(-0.5, 0.5),
        ylim=(min(0.9, found["low"] - 0.02), 1.01),
        xticks=(),
    )
    for axes in (keys, traffic, mass):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"SmolLM2-135M, {demo['prompt_tokens']} tokens of prompt, {cpe['method']}", fontsize=10)
    figure.savefig(PICTURE, dpi=140)


def _part(answer: dict[str, Any], part: str) -> float:
    decode = answer["report"]["decode"]
    names = SMALL if part == "small" else (part,)
    return float(sum(decode[name] for name in names) / decode["steps"] / 1e6)


DOCUMENTS: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": {
        "demo": demo_section,
        "decode": bench_tables.decode_summary,
        "accuracy": eval_tables.accuracy_summary,
    },
    ROOT / "docs" / "bench.md": {
        "attention": bench_tables.attention_sections,
        "decode": bench_tables.decode_sections,
        "prefill": bench_tables.prefill_sections,
        "break-even": bench_tables.break_even_sections,
    },
    ROOT / "docs" / "results.md": {"trends": eval_tables.trends_section, "runs": eval_tables.runs_section},
    ROOT / "docs" / "methods" / "cis.md": {
        "passkey": passkey_section,
        "score": score_gate_section,
        "score passkey": score_passkey_section,
        "sweep": sweep_section,
        "compact": compact_section,
    },
}

if __name__ == "__main__":
    main()
