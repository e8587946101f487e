"""The tables of docs/bench.md, from the committed JSON files beside this script: attention operator, decode step, prefill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prehoc.plot import paper

FOLDER = Path(__file__).resolve().parent
MAIN = "llama2-7b", 8, 16384  # the cell of the targets


def attention_sections() -> str:
    """Return every attention benchmark: times of all cells, and in full the cell of the targets."""
    parts = [attention_section(path) for path in sorted(FOLDER.glob("attention_*.json"))]
    return "\n".join(parts)


def attention_section(path: Path) -> str:
    document = json.loads(path.read_text())
    settings = document["settings"]
    cells = [cell for cell in document["cells"] if "rows" in cell]
    streams = [_stream(cell) for cell in cells]  # what the percentages of each cell refer to
    spread = " to ".join(dict.fromkeys(f"{stream:.1f}" for stream in (min(streams), max(streams))))
    inputs = _inputs(settings)
    checked = "every row passed --refcheck" if settings["refcheck"] else "without --refcheck"
    lines = [
        f"\n{settings['dtype']}; queries, keys and values of {inputs}; {document['machine']['torch_threads']} threads of "
        f"{document['machine']['cpu']}, stream {spread} GB/s; {len(cells[0]['layers'])} layers, {settings['rounds']} "
        f"rounds of {settings['steps']} steps, {checked} ([data and command](../benchmarks/{path.name})). Milliseconds a step "
        "and layer, in brackets times faster than our dense:\n",
    ]
    names = list(dict.fromkeys(row["row"] for cell in cells for row in cell["rows"]))
    head = [f"{_shape(cell)} {cell['batch']} x {_length(cell)}" for cell in cells]
    lines += ["| | " + " | ".join(head) + " |", "|---" * (len(cells) + 1) + "|"]
    for name in names:
        found = [next((row for row in cell["rows"] if row["row"] == name), {}) for cell in cells]
        lines.append(f"| `{name}` | " + " | ".join(_time(row) for row in found) + " |")
    main = next((cell for cell in cells if (cell["shape"]["name"], cell["batch"], cell["length"]) == MAIN), None)
    if main is not None:
        lines += ["", *_in_full(main)]
    return "\n".join(lines) + "\n"


def _inputs(settings: dict[str, Any]) -> str:
    """Return the models whose queries and keys were taken, each once."""
    return ", ".join(sorted({one["model"]["name"] if "model" in one else "random" for one in settings["inputs"]}))


def _stream(cell: dict[str, Any]) -> float:
    row = next(row for row in cell["rows"] if "why" not in row)
    return float(row["gb_per_second"] / row["stream_percent"] * 100)


def _in_full(cell: dict[str, Any]) -> list[str]:
    """Return one cell with everything that was derived, beside what the paper measured on a GPU."""
    bare = {row["gathers"]: _rate(row) for row in cell["rows"] if row["row"].startswith("read (")}
    theirs = paper.ATTENTION_MS.get((cell["batch"], cell["length"]))
    lines = [
        f"{_shape(cell)} {cell['batch']} x {_length(cell)} in full. *of read*: the attention kernel's rate against the row that "
        "only reads, in order or by a list. *paper*: times faster than its flash row, in its own cell of the same size.\n",
        "| | ms | selection | attention | MB | % of stream | attention % of stream | of read | rho | ms / formula "
        "| x dense | x sdpa | paper x flash |",
        "|---" * 13 + "|",
    ]
    for row in cell["rows"]:
        if "why" in row:
            continue
        share = "" if row["row"].startswith("read (") else f"{_rate(row) / bare[row['gathers']]:.0%}"
        column = paper.column(row["row"])
        ratio = "" if theirs is None or column is None else f"{theirs[0] / theirs[column]:.1f}"
        rho = row["retrieval_ratio"]
        lines.append(
            f"| `{row['row']}` | {row['ms']:.2f} | {row.get('selection_ms', 0):.2f} | {row['attention_ms']:.2f} | "
            f"{row['bytes_read'] / 1e6:.0f} | {row['stream_percent']:.0f} | {row['attention_percent']:.0f} | {share} | "
            f"{'' if rho is None else f'{rho:.3f}'} | {row['over_formula']:.2f} | {row['times_dense']:.2f} | "
            f"{row['times_sdpa']:.2f} | {ratio} |"
        )
    return lines


def _rate(row: dict[str, Any]) -> float:
    return float((row["bytes_processed"] + row["bytes_indices"]) / row["attention_ms"])


def _shape(cell: dict[str, Any]) -> str:
    return str(cell["shape"]["name"])


def _length(cell: dict[str, Any]) -> str:
    return f"{cell['length'] // 1024}k" if cell["length"] % 1024 == 0 else str(cell["length"])


def _time(row: dict[str, Any]) -> str:
    if "ms" not in row:
        return ""
    times = f" ({row['times_dense']:.2f})" if row["row"] != "dense" else ""
    return f"{row['ms']:.3g}{times}"


def decode_sections() -> str:
    """Return every benchmark of the decode step."""
    return "".join(decode_section(path) for path in sorted(FOLDER.glob("decode*.json")))


def decode_section(path: Path) -> str:
    """Return the tables of one benchmark of the decode step."""
    document = json.loads(path.read_text())
    machine = document["machine"]
    lines = []
    for cell in document["cells"]:
        kernels = {"cpu": "C++ kernels", "reference": "torch kernels"}[cell["rows"][1]["backend"]]
        lines += [
            f"\n{cell['batch']} x {cell['context']} tokens, {kernels}: median milliseconds of a decode step, "
            f"{document['dtype']}, {machine['torch_threads']} threads of {machine['cpu']}, stream "
            f"{cell['stream_bytes_per_second'] / 1e9:.0f} GB/s ([data and command](../benchmarks/{path.name}))\n",
            "| | ms | faster than sdpa | than our dense | attention | selection | rest | MB read | retained mass |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row in cell["rows"]:
            name = "stock transformers (sdpa)" if row["system"] == "sdpa" else f"`{row['system']}`"
            cells = [f"{row['step_ms']:.1f}", f"{row['times_sdpa']:.2f}x", f"{row['times_dense']:.2f}x"]
            cells += [f"{row[part]:.1f}" if part in row else "" for part in ("attention_ms", "selection_ms", "rest_ms")]
            cells.append(f"{row['bytes_per_step'] / 1e6:.0f}" if "bytes_per_step" in row else "")
            cells.append(f"{row['retained_mass']:.3f}" if row.get("retained_mass") is not None else "")
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def decode_summary() -> str:
    """Return the README's table: one line a cell, the fastest row of each kind."""
    lines = [
        "| SmolLM2-135M, float32, 2 CPU threads | stock transformers | its best dense | our dense | oracle | CIS "
        "| CIS against stock | against its best dense | against our dense |",
        "|---" * 9 + "|",
    ]
    found = []
    for path in sorted(FOLDER.glob("decode*.json")):
        document = json.loads(path.read_text())
        machine = document["machine"]["cpu"].replace("(R)", "").replace(" Processor", "")
        for cell in document["cells"]:
            times = {row["system"]: row["step_ms"] for row in cell["rows"]}
            if cell["rows"][1]["backend"] != "cpu":
                continue
            kinds: dict[str, float] = {}
            for name, ms in times.items():
                kind = name.removeprefix("packed:").removeprefix("compiled:").partition(":")[0].partition("-")[0]
                kinds[kind] = min(ms, kinds.get(kind, ms))
            stock, ours, oracle, cis = (kinds.get(kind) for kind in ("sdpa", "dense", "oracle", "cis"))
            assert stock is not None and ours is not None and cis is not None
            cells = [
                f"{times['sdpa']:.1f} ms",
                *(f"{ms:.1f}" if ms is not None else "" for ms in (stock, ours, oracle, cis)),
            ]
            cells += [f"{ms / cis:.2f}x" for ms in (times["sdpa"], stock, ours)]
            where = f"{cell['batch']} x {cell['context']} tokens, {machine} ([data](benchmarks/{path.name}))"
            found.append(((cell["batch"], cell["context"]), f"| {where} | " + " | ".join(cells) + " |"))
    return "\n".join([*lines, *(line for _, line in sorted(found))]) + "\n"


def prefill_sections() -> str:
    """Return every benchmark of the prompt."""
    lines: list[str] = []
    for path in sorted(FOLDER.glob("prefill_*.json")):
        document = json.loads(path.read_text())
        lines += [
            f"\nPrompt to first token, {document['dtype']}, {document['machine']['torch_threads']} threads of "
            f"{document['machine']['cpu']} ([data and command](../benchmarks/{path.name})):\n",
            "| tokens | | s | 10-90 % | x sdpa | x dense | operations | of dense |",
            "|---" * 8 + "|",
        ]
        for row in document["rows"]:
            work, share = "", ""
            if "operations" in row:
                work = f"{row['operations'] / 1e12:.2f} T"
                share = f"{row['operations'] / row['operations_dense']:.1%}"
            lines.append(
                f"| {row['batch']} x {row['length']} | `{row['system']}` | {row['seconds']:.2f} | "
                f"{row['seconds_10']:.2f}-{row['seconds_90']:.2f} | {row['times_sdpa']:.2f} | {row['times_dense']:.2f} | "
                f"{work} | {share} |"
            )
    return "\n".join(lines) + "\n"


def break_even_sections() -> str:
    """Return from which length on a method was faster than dense, every measured length."""
    lines: list[str] = []
    for path in sorted(FOLDER.glob("break_even_*.json")):
        document = json.loads(path.read_text())
        shape = document["shape"]
        lines += [
            f"\nBatch {document['batch']} of {shape['heads']}/{shape['kv_heads']} x {shape['dim']}, {document['dtype']}, "
            f"queries and keys of {_inputs(document['settings'])}, {document['machine']['torch_threads']} threads of "
            f"{document['machine']['cpu']}: milliseconds a step and layer, dense / method "
            f"([data and command](../benchmarks/{path.name}))\n",
            "| | faster from | " + " | ".join(map(str, document["methods"][0]["lengths"])) + " |",
            "|---" * (len(document["methods"][0]["lengths"]) + 2) + "|",
        ]
        for found in document["methods"]:
            times = zip(found["dense_ms"], found["method_ms"], strict=True)
            cells = [str(found["length"] or "none"), *(f"{dense:.3f} / {ours:.3f}" for dense, ours in times)]
            lines.append(f"| `{found['method']}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
