"""A sweep over the prefill settings of PSAW and ETF that can be interrupted and loses nothing that was finished."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prehoc.eval.perplexity import Change, Measured, check_lengths, measure, paired_change, start_layer
from prehoc.eval.prefix import DensePrefix
from prehoc.eval.windows import Windows
from prehoc.methods import CPE, ETF, PSAW, Dense
from prehoc.selection import Method
from prehoc.trace import position_limit

Report = Callable[[str, int, int], None]

# start layers whose dense part is kept: those of the search
STARTS = (0.5, 0.67, 0.75, 0.83, 0.9)
_BOTH = ("parts", "phi", "alpha", "psaw_start_layer", "psi", "gamma", "etf_start_layer", "kv", "sink", "local")


def spell(method: Method) -> str:
    """Return a method with every key that matters for prefill, so that the name outlives a change of defaults."""
    if isinstance(method, CPE):
        unknown = set(method.parts) - {"psaw", "etf"}
        if unknown:
            raise ValueError(f"parts={'+'.join(method.parts)} selects in decode too; a prefill sweep takes psaw+etf")
        method = dataclasses.replace(
            method, psaw_start_layer=method.psaw().start_layer, etf_start_layer=method.etf().start_layer
        )
        keys: Sequence[str] = _BOTH
    elif isinstance(method, (PSAW, ETF, Dense)):
        keys = [field.name for field in dataclasses.fields(method)]
    else:
        raise ValueError(
            f"method {method.name!r} does not prune a prefill; give dense, psaw, etf or cpe:parts=psaw+etf"
        )
    pairs = ((key, getattr(method, key)) for key in keys)
    text = ",".join(f"{key}={'+'.join(value) if isinstance(value, tuple) else value}" for key, value in pairs)
    return method.name + (":" + text if text else "")


def both(psaw: PSAW, etf: ETF) -> CPE:
    """Return PSAW and ETF together, without selection in decode."""
    return CPE(
        parts=("psaw", "etf"),
        phi=psaw.phi,
        alpha=psaw.alpha,
        psaw_start_layer=psaw.start_layer,
        psi=etf.psi,
        gamma=etf.gamma,
        etf_start_layer=etf.start_layer,
        kv=etf.kv,
        sink=psaw.sink,
        local=psaw.local,
    )


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting over all windows; perplexity changes are against dense, paired by window."""

    method: Method
    measured: Measured
    continuation: Change
    window: Change | None

    @property
    def saved(self) -> float:
        """Share of the dense prefill's operations that are not done."""
        return 1 - self.measured.operations / self.measured.operations_dense


class Sweep:
    """Measures settings over the same windows, batch by batch; every finished batch is a line of the file `part`.

    Parameters
    ----------
    model : Module
        A causal language model in evaluation mode.
    name : str
        How the model is called in `part`.
    windows : Windows
        What to read.
    continuation : int
        Tokens decoded at the end of each window.
    batch : int
        Windows read together.
    part : Path
        JSON lines; those of the same model, windows, continuation and batch are not measured again.
    block, backend
        As for `measure`.
    report : callable, optional
        ``report(stage, done, total)``.
    share : bool
        Compute the dense layers that all settings share once per batch, and keep them in memory.

    Raises
    ------
    ValueError
        When the windows do not fit the model.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        windows: Windows,
        continuation: int,
        batch: int,
        part: Path,
        block: int = 1,
        backend: str | None = None,
        report: Report | None = None,
        share: bool = True,
    ) -> None:
        check_lengths(position_limit(model.config), windows.tokens.shape[1], continuation)
        self._model, self._windows, self._continuation = model, windows, continuation
        self._part, self._report = part, report or (lambda stage, done, total: None)
        self._block, self._backend = block, backend
        self._batches = windows.tokens.split(batch)
        precision = f"{next(model.parameters()).dtype} {torch.get_float32_matmul_precision()}"
        digest = hashlib.sha256(windows.tokens.numpy().tobytes()).hexdigest()
        facts = [name, precision, digest, continuation, batch, block]
        self._run = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        self._done = _read(part, self._run)
        starts = {start_layer(model, PSAW(start_layer=value)) for value in STARTS}
        self._starts = {start for start in starts if start is not None}
        self._prefixes: list[DensePrefix | None] = [
            DensePrefix(model, self._starts) if share else None for _ in self._batches
        ]
        self.measured_batches = 0

    def row(self, method: Method) -> Row:
        """Return a setting's row, measuring what no line holds yet."""
        measured, dense = self._measure(method), self._measure(Dense())
        window = None
        if measured.window_nll is not None and dense.window_nll is not None:
            window = paired_change(measured.window_nll, dense.window_nll)
        return Row(method, measured, paired_change(measured.continuation_nll, dense.continuation_nll), window)

    def finished(self) -> list[str]:
        """Return the settings that were measured on every batch, in the order they were finished."""
        count = len(self._batches)
        names = list(dict.fromkeys(name for name, _ in self._done))
        return [name for name in names if all((name, i) in self._done for i in range(count))]

    def _measure(self, method: Method) -> Measured:
        name = spell(method)
        parts = []
        for i, batch in enumerate(self._batches):
            if (name, i) not in self._done:
                self._done[name, i] = self._one(method, name, i, batch)
            parts.append(self._done[name, i])
        return Measured(
            None if parts[0].window_nll is None else tuple(x for p in parts for x in p.window_nll or ()),
            tuple(x for p in parts for x in p.continuation_nll),
            sum(p.operations for p in parts),
            sum(p.operations_dense for p in parts),
            sum(p.seconds for p in parts),
        )

    def _one(self, method: Method, name: str, i: int, batch: Tensor) -> Measured:
        stage = f"{name}, batch {i + 1} of {len(self._batches)}"
        prefix = self._prefixes[i]
        if prefix is not None and not prefix.ready and method.name != "dense":
            prefix.compute(self._model, batch[:, : -self._continuation])
        found = measure(
            self._model,
            method,
            batch,
            self._continuation,
            block=self._block,
            backend=self._backend,
            prefix=prefix,
            step=lambda done, total: self._report(stage, done, total),
        )
        rounded = {
            **dataclasses.asdict(found),
            "window_nll": None if found.window_nll is None else _round(found.window_nll),
            "continuation_nll": _round(found.continuation_nll),
            "seconds": round(found.seconds, 2),
        }
        self._part.parent.mkdir(parents=True, exist_ok=True)
        with self._part.open("a") as file:
            file.write(json.dumps({"run": self._run, "method": name, "batch": i, **rounded}) + "\n")
        self.measured_batches += 1
        return _measured(rounded)


def _round(values: Sequence[float]) -> list[float]:
    return [round(value, 6) for value in values]


def _measured(line: Mapping[str, Any]) -> Measured:
    window = line["window_nll"]
    return Measured(
        None if window is None else tuple(window),
        tuple(line["continuation_nll"]),
        line["operations"],
        line["operations_dense"],
        line["seconds"],
    )


def _read(part: Path, run: str) -> dict[tuple[str, int], Measured]:
    """Return the finished batches of a run; a line that an interruption cut short is passed over."""
    done = {}
    for text in part.read_text().splitlines() if part.is_file() else []:
        try:
            line = json.loads(text)
            if line["run"] == run:
                done[line["method"], line["batch"]] = _measured(line)
        except (ValueError, KeyError, TypeError):
            continue
    return done
