"""One page of everything that some runs say, beside the paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prehoc.plot import figures_bench, figures_eval, figures_rivals, figures_trace, figures_tune, paper, tables
from prehoc.plot.page import Block, Section, render
from prehoc.plot.runs import Run

KINDS: dict[str, tuple[str, Callable[[Run], list[Block]]]] = {
    "attention": ("Attention operator", figures_bench.attention),
    "decode": ("Decode throughput", figures_bench.decode),
    "prefill": ("Prefill", tables.prefill),
    "break-even": ("Break-even", tables.break_even),
    "demo": ("Demo", tables.demo),
    "eval": ("Evaluation", figures_eval.evaluation),
    "trends": ("Paired differences of methods", figures_eval.trends),
    "rivals": ("Every method on the same queries and keys", figures_rivals.rivals),
    "tune cis": ("Settings of CIS", figures_tune.tune_cis),
    "tune prefill": ("Settings of PSAW and ETF", figures_tune.tune_prefill),
    "theory": ("Bounds", figures_tune.theory),
    "trace": ("Trace", figures_trace.tracing),
}


def report(runs: Sequence[Run], figures: Path | None = None, title: str = "prehoc report") -> str:
    """Return the HTML page of some runs.

    Parameters
    ----------
    runs : sequence of Run
        In the order of their sections.
    figures : Path, optional
        A folder where every figure is written too, as SVG and PNG.
    title : str
        Heading of the page.

    Returns
    -------
    str
        A page with nothing outside itself.

    Raises
    ------
    ValueError
        When matplotlib is missing, or a run lacks something that its kind has.
    """
    sections = [_section(run) for run in runs]
    traces = [run for run in runs if run.kind == "trace"]
    if traces:
        sections.append(Section("All traces", (), [figures_trace.cosines(traces)]))
    answered = {part for section in sections for block in section.blocks for part in block.paper}
    missing = [(f"{part}: {what}", need) for part, (what, need) in paper.PARTS.items() if part not in answered]
    return render(title, sections, missing, figures)


def _section(run: Run) -> Section:
    title, blocks = KINDS[run.kind]
    document = (run.document.get("runs") or [run.document])[0]
    try:
        shown = blocks(run)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{run.name} is no complete {run.kind} result ({error!r}); run its command again") from error
    wrong = run.document.get("invalid") or []
    warning = f"This run is invalid, nothing reads faster than memory: {'; '.join(wrong)}" if wrong else ""
    return Section(f"{title}: {run.name}", _facts(document), shown, warning)


def _facts(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return where the numbers of a run come from."""
    model = document.get("model")
    facts: list[tuple[str, Any]] = [
        *((name.replace("_", " "), value) for name, value in document.items() if name.startswith("command")),
        ("model", ", ".join(map(str, model.values())) if isinstance(model, dict) else model),
        ("dtype", document.get("dtype")),
        ("backend", document.get("backend")),
        ("machine", _machine(document.get("machine"))),
        ("versions", ", ".join(f"{name} {value}" for name, value in (document.get("versions") or {}).items())),
        ("data", _texts(document)),
        ("interval", document.get("interval")),
    ]
    if "stream_bytes_per_second" in document:
        facts.append(("stream, best of the cells", f"{document['stream_bytes_per_second'] / 1e9:.1f} GB/s"))
    return [(name, str(value)) for name, value in facts if value]


def _machine(found: Any) -> str:
    if not isinstance(found, dict):
        return str(found or "")
    accelerators = "".join(f", {name}" for name in found["gpus"])
    counts = f"{_counted(found['cpu_count'], 'core')}, {_counted(found['torch_threads'], 'thread')}"
    return f"{found['cpu']}, {counts}{accelerators}, {found['system']}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _texts(document: Mapping[str, Any]) -> str:
    texts = document.get("texts") or ([document["text"]] if document.get("text") else [])
    return ", ".join(f"{text['file']} (sha256 {text['sha256'][:12]})" for text in texts)
