"""What a trace shows: Figures 2 to 5, 7, 8, 10 and 11 of the paper from recorded queries, keys and selections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from prehoc import mass
from prehoc.plot.page import Block, Drawing, Table, legend, number, panels, style
from prehoc.plot.recorded import Layer, full_layers, read_mask
from prehoc.plot.runs import Run
from prehoc.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEAD = 0
"""The head that is shown of each layer."""


def tracing(run: Run) -> list[Block]:
    """Return the table and figures of one trace, those that its records allow."""
    found = run.trace
    assert found is not None
    layers = full_layers(found)
    shown = [layers[len(layers) * i // 6] for i in (1, 3, 5)] if len(layers) > 2 else layers
    where = f"layers {', '.join(map(str, shown))}, head {HEAD}"
    blocks: list[Block] = [_table(found)]
    if found.retrieved.any() and np.isfinite(found.overlap).any():
        blocks.append(
            Drawing(
                "Overlap with the next queries' critical keys",
                "Share of the oracle's critical keys that were read, over the steps since a head's last retrieval: the median of "
                "all layers and heads with the range from 10 to 90 %.",
                draw=lambda: _overlap(found),
                paper=("Figure 4",),
            )
        )
    if found.indices is not None:
        blocks.append(
            Drawing(
                "Which keys are read",
                f"Keys that each decode step read (dark), {where}; steps to the right, positions upwards.",
                draw=lambda: _maps(found, shown, lambda layer: read_mask(found, layer)[HEAD], "keys read"),
                paper=("Figure 5",),
            )
        )
    if found.q is None or found.k is None:
        return blocks
    blocks += [
        Drawing(
            "Critical keys of neighbouring queries",
            f"The oracle's critical keys at each step, {where}: horizontal runs are keys that stay "
            "critical, clusters are neighbours.",
            draw=lambda: _maps(found, shown, lambda layer: Layer(found, layer).oracle()[HEAD], "critical keys"),
            paper=("Figure 2/11",),
        ),
        Drawing(
            "Attention maps",
            f"Logarithm of the attention weight, darker is more, {where}.",
            draw=lambda: _maps(found, shown, lambda layer: _logs(Layer(found, layer)), "log10 of the weight"),
            paper=("Figure 3",),
        ),
    ]
    if 0 < found.retrieved[:, layers].mean() < 1:
        blocks.append(
            Drawing(
                "Query norms of sharing pairs",
                "Norm of a query that shares divided by the norm of the query that retrieved the set, over all layers and heads.",
                draw=lambda: _norms(found),
                paper=("Figure 8",),
            )
        )
    if found.indices is not None:
        blocks.append(
            Drawing(
                "Information change against its bound",
                "Change of routing information by leaving keys out, and its bound from the dropped mass, one point per layer and "
                "query head. Above the dashed line y = x the bound holds.",
                draw=lambda: _information(found, layers),
                paper=("Figure 7",),
            )
        )
    return blocks


def cosines(traces: Sequence[Run]) -> Drawing:
    """Return the figure of consecutive queries' cosine, a line per trace."""
    return Drawing(
        "Cosine of consecutive queries",
        "Share of (step, layer, head) whose query has at most this cosine with the query of the step before, a line per trace.",
        draw=lambda: _cosines(traces),
        paper=("Figure 10",),
    )


def _table(found: Trace) -> Table:
    s = found.summary()
    cosine = s["consecutive_cosine"]
    rows = [
        ("method", found.meta["method"] + (" (observed: attention was dense)" if found.meta["observe"] else "")),
        ("triples n", f"{s['triples']}, {s['counted_triples']} with something to choose"),
        ("retrieval ratio", number(s["retrieval_ratio"], 3)),
        ("keys read", number(s["keys"], 1)),
        ("retained mass", number(s["retained"], 4)),
        (
            "oracle, and with as many keys as were read",
            f"{number(s['oracle'], 4)}, {number(s['oracle_equal_keys'], 4)}",
        ),
        ("beta, and at equal keys", f"{number(s['beta'], 4)}, {number(s['beta_equal_keys'], 4)}"),
        ("overlap", number(s["overlap"], 3)),
        (
            "cosine of consecutive queries, 10 / 50 / 90 %",
            " / ".join(number(cosine[key], 3) for key in ("10%", "50%", "90%")),
        ),
    ]
    return Table(f"{found.meta['prompt_tokens']} + {found.meta['steps']} tokens", ("measure", "value"), rows)


def _ages(found: Trace) -> NDArray[np.int64]:
    """Return int64 ``[S, N, Hs]``: steps since a head's last retrieval, -1 before the first."""
    step = np.arange(found.retrieved.shape[0])[:, None, None]
    last = np.maximum.accumulate(np.where(found.retrieved, step, -1), 0)
    return np.where(last < 0, -1, step - last)


def _overlap(found: Trace) -> Figure:
    ages, finite = _ages(found), np.isfinite(found.overlap)
    figure, (axis,) = panels(1, 3.0)
    rows = []
    for age in range(int(ages.max()) + 1):
        values = found.overlap[(ages == age) & finite]
        if values.size >= 20:  # fewer say nothing about a range
            rows.append((age, *np.quantile(values, (0.1, 0.5, 0.9))))
    table = np.array(rows).reshape(-1, 4)
    axis.fill_between(table[:, 0], table[:, 1], table[:, 3], color="0.85", label="10 to 90 %")
    axis.plot(table[:, 0], table[:, 2], label="median", **style(0))
    axis.set(xlabel="steps since the retrieval", ylabel="overlap", ylim=(0, 1.02))
    axis.locator_params(axis="x", integer=True)
    legend(figure, axis)
    return figure


def _maps(found: Trace, layers: Sequence[int], values: Any, label: str) -> Figure:
    figure, axes = panels(len(layers), 2.9)
    for axis, layer in zip(axes, layers, strict=True):
        shown = np.asarray(values(layer))  # [S, n]
        binned, width = _binned(shown.astype(np.float32).T)
        picture = axis.imshow(
            binned,
            aspect="auto",
            origin="lower",
            cmap="Greys",
            interpolation="nearest",
            extent=(-0.5, shown.shape[0] - 0.5, 0, binned.shape[0] * width),
        )
        axis.set(title=f"layer {layer}", ylabel="key")
        axis.locator_params(axis="x", integer=True)
        if shown.dtype != bool:
            figure.colorbar(picture, ax=axis, label=label)
    axes[-1].set_xlabel("step")
    return figure


def _binned(shown: NDArray[np.float32], most: int = 512) -> tuple[NDArray[np.float32], int]:
    """Return the largest of each run of neighbouring rows, so that no key falls between two pixels, and the run's length."""
    width = -(-shown.shape[0] // most)
    padded = np.pad(shown, ((0, -shown.shape[0] % width), (0, 0)), constant_values=-np.inf)
    return padded.reshape(-1, width, shown.shape[1]).max(1), width


def _logs(layer: Layer) -> NDArray[np.float32]:
    return np.asarray(layer.mean[HEAD].clamp(min=1e-6).log10())


def _norms(found: Trace) -> Figure:
    assert found.q is not None
    steps, layers, heads = found.retrieved.shape
    ages = _ages(found)
    step = np.arange(steps)[:, None, None]
    norms = np.linalg.norm(found.q, axis=-1).reshape(steps, layers, heads, -1)  # [S, N, Hs, G]
    anchor = np.take_along_axis(norms, (step - np.maximum(ages, 0))[..., None], 0)
    ratio = (norms / anchor)[(ages > 0) & np.isfinite(norms).all(-1)].ravel()
    low, high = np.quantile(ratio, (0.005, 0.995))
    figure, (axis,) = panels(1, 2.8)
    axis.hist(ratio, bins=60, range=(min(low, 0.9), max(high, 1.1)), color="#56b4e9", edgecolor="black", linewidth=0.3)
    axis.axvline(1, color="black", linestyle="--", linewidth=0.8)
    tenth, median, ninth = np.quantile(ratio, (0.1, 0.5, 0.9))
    axis.set(
        xlabel="norm of the sharing query / norm of the anchor",
        ylabel="pairs",
        title=f"n = {ratio.size}; 10 / 50 / 90 %: {tenth:.3f} / {median:.3f} / {ninth:.3f}",
    )
    return figure


def _information(found: Trace, layers: Sequence[int]) -> Figure:
    steps, columns = found.meta["steps"], found.meta["prompt_tokens"] + found.meta["steps"]
    changes, bounds = [], []
    for number_ in layers:
        full = Layer(found, number_).weights  # [Hs, G, S, n]
        read = torch.from_numpy(read_mask(found, number_))[:, None]
        kept = full * read
        dropped = (full * ~read).sum(-1, dtype=torch.float64).mean(-1)  # [Hs, G]
        less = kept / kept.sum(-1, keepdim=True)
        changes.append((mass.routing_information(full) - mass.routing_information(less)).abs().flatten())
        bounds.append(mass.information_bound(dropped.clamp(0, 1), columns, steps).flatten())
    x, y = (torch.cat(found_).clamp(min=1e-6).numpy() for found_ in (changes, bounds))
    figure, (axis,) = panels(1, 3.2)
    axis.plot(x, y, **(style(0) | {"linestyle": "none", "markersize": 3}), label="layer and query head")
    ends = [min(x.min(), y.min()), max(x.max(), y.max())]
    axis.plot(ends, ends, color="black", linestyle="--", linewidth=0.8, label="y = x")
    axis.set(xscale="log", yscale="log", xlabel="information change, nats", ylabel="bound, nats")
    legend(figure, axis)
    return figure


def _cosines(traces: Sequence[Run]) -> Figure:
    figure, (axis,) = panels(1, 3.0)
    for index, run in enumerate(traces):
        assert run.trace is not None
        values = np.sort(run.trace.consecutive[np.isfinite(run.trace.consecutive)])
        shares = np.linspace(0, 1, 201)
        line = style(index) | {"markevery": 20}
        axis.plot(np.quantile(values, shares), shares, label=f"{run.name}, n = {values.size}", **line)
    axis.set(xlabel="cosine with the query before", ylabel="share of pairs", ylim=(0, 1))
    axis.grid(color="0.9")
    legend(figure, axis)
    return figure
