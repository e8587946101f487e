"""Every row against the reference backend in float32, before it is timed: a fast kernel that is wrong is worth nothing."""

from __future__ import annotations

import dataclasses

import torch

from prehoc.bench.rows import MethodRow, Row
from prehoc.kernels import reference
from prehoc.selection import Rows, Selection, State, Step, Window, attend, decide

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest error of an output, relative to its largest value."""
OVERLAP = 0.98
"""Least share of the reference's keys that a selection must hold: sets may differ in keys within rounding of the last."""


class RefcheckError(Exception):
    """A row does not compute what the reference computes."""


def check_rows(row: Row, steps: list[Step]) -> dict[str, float]:
    """Run a row from its first step on and compare it with the reference at every one.

    The output is compared on the row's own selection, the selection with what the reference backend selects.

    Parameters
    ----------
    row : Row
        A row that has just begun.
    steps : list of Step
        Consecutive steps of one layer; the batch rows are alike.

    Returns
    -------
    dict
        ``error``, the largest relative error, and ``overlap``, the least share of equal keys.

    Raises
    ------
    RefcheckError
        When an error is above `TOLERANCE` or an overlap below `OVERLAP`.
    """
    worst, least, state = 0.0, 1.0, State()
    k, v = (x[:1].float() for x in (steps[-1].k, steps[-1].v))
    for number, step in enumerate(steps):
        out, decision, _ = row.run(step)
        chosen = row.selected(step, decision)
        rows = Rows(step.rows.pad[:1], step.rows.prompt[:1])
        n = step.columns
        exact = dataclasses.replace(
            step,
            q=step.q[:1].float(),
            k=k[:, :, :n],
            v=v[:, :, :n],
            rows=rows,
            masked=step.masked[:1],
            backend="reference",
            peers={step.layer: state},
        )
        for at in dict.fromkeys((0, step.q.shape[0] - 1)):
            expected = attend(reference, exact, _one(chosen, at))
            error = float((out[at : at + 1].float() - expected).abs().max() / expected.abs().max())
            worst = max(worst, error)
            if not error <= TOLERANCE[step.q.dtype]:  # NaN fails too
                raise RefcheckError(
                    f"{row.name} is wrong at layer {step.layer}, step {number}, batch row {at}: its output differs from the "
                    f"reference by {error:.2g} of the largest value, {TOLERANCE[step.q.dtype]:g} is allowed"
                )
        if isinstance(row, MethodRow):
            wanted = decide(row.plan, exact, state)
            for at in dict.fromkeys((0, step.q.shape[0] - 1)):
                share = _overlap(_one(chosen, at), wanted.selection, n)
                least = min(least, share)
                if share < OVERLAP:
                    raise RefcheckError(
                        f"{row.name} is wrong at layer {step.layer}, step {number}, batch row {at}: it reads {share:.1%} of the "
                        f"keys that the reference reads, {OVERLAP:.0%} is the least"
                    )
    return {"error": worst, "overlap": least}


def _one(chosen: Selection | Window | None, row: int) -> Selection | Window | None:
    """Return what one batch row reads."""
    only = slice(row, row + 1)
    if isinstance(chosen, Selection):
        return Selection(chosen.indices[only], chosen.lengths[only])
    if isinstance(chosen, Window):
        return Window(chosen.sink, chosen.start[only])
    return None


def _overlap(ours: Selection | Window | None, wanted: Selection | Window | None, columns: int) -> float:
    """Return the share of equal keys, the mean over heads; 0 where one reads a range and the other a list."""
    if not (isinstance(ours, Selection) and isinstance(wanted, Selection)):
        return float(ours == wanted)
    read = [_read(chosen, columns) for chosen in (ours, wanted)]
    both, most = (read[0] & read[1]).sum(-1), torch.maximum(read[0].sum(-1), read[1].sum(-1))
    return float((both / most).mean())


def _read(chosen: Selection, columns: int) -> torch.Tensor:
    """Return bool ``[1, Hs, columns]``."""
    used = torch.arange(chosen.indices.shape[2], device=chosen.indices.device) < chosen.lengths[..., None]
    read = torch.zeros((*chosen.lengths.shape, columns + 1), dtype=torch.bool, device=used.device)
    return read.scatter_(2, chosen.indices.long().where(used, columns), True)[..., :columns]
