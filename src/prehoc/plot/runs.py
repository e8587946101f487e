"""Results that prehoc wrote, recognised by what they hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prehoc.trace import Trace

ACCEPTED = (
    "JSON of prehoc bench attention, decode, prefill or break-even, of tune cis or prefill, of demo --json, of "
    "benchmarks/rivals.py, theory_looseness.py or trends.py; the folder of prehoc eval or its summary.json; a trace (npz)"
)


@dataclasses.dataclass(frozen=True)
class Run:
    """One result.

    Attributes
    ----------
    kind : str
        What wrote it: ``attention``, ``decode``, ``prefill``, ``break-even``, ``tune cis``, ``tune prefill``, ``theory``,
        ``rivals``, ``demo``, ``eval``, ``trends`` or ``trace``.
    name : str
        The name of its file or folder.
    document : mapping
        Its JSON; of a trace, the meta.
    trace : Trace or None
        The trace.
    """

    kind: str
    name: str
    document: Mapping[str, Any]
    trace: Trace | None = None


def read_run(path: Path) -> Run:
    """Read a result.

    Raises
    ------
    ValueError
        When there is nothing, an evaluation that is not finished, or something that prehoc did not write.
    """
    if not path.exists():
        raise ValueError(f"there is no run {str(path)!r}; accepted are: {ACCEPTED}")
    if path.is_dir():
        return _evaluation(path)
    if path.suffix == ".npz":
        found = Trace.load(path)
        return Run("trace", path.name, found.meta, found)
    document = _json(path)
    kind = _kind(document)
    if kind is None:
        raise ValueError(f"{str(path)!r} is nothing that prehoc wrote; accepted are: {ACCEPTED}")
    return Run(kind, path.resolve().parent.name if path.name == "summary.json" else path.name, document)


def _evaluation(folder: Path) -> Run:
    file = folder / "summary.json"
    if file.exists():
        return Run("eval", folder.resolve().name, _json(file))
    if (folder / "run.json").exists():
        raise ValueError(f"the evaluation in {str(folder)!r} is not finished; give its command once more")
    raise ValueError(f"the folder {str(folder)!r} is no run of prehoc eval; accepted are: {ACCEPTED}")


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r} cannot be read as JSON ({error}); accepted are: {ACCEPTED}") from error
    return found if isinstance(found, dict) else {}


def _kind(document: Mapping[str, Any]) -> str | None:
    """Return what wrote a document, None for anything else."""
    if document.get("benchmark") in ("attention", "decode", "prefill", "break-even", "trends"):
        return str(document["benchmark"])
    keys = document.keys()
    first = (document.get("rows") or document.get("runs") or [{}])[0]
    if {"results", "printed_form_violated_share"} <= keys:
        return "theory"
    if {"tables", "chat_template"} <= keys:
        return "eval"
    if {"answers", "tokens_in_common"} <= keys:
        return "demo"
    if "runs" in keys and "rows" in first:
        return "tune prefill"
    if {"budgets", "layers", "rows"} <= keys and "varies" in first:
        return "tune cis"
    if "rows" in keys and {"method", "retrieved", "beta"} <= first.keys():
        return "rivals"
    return None
