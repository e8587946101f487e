"""Double Sparsity: a few label channels of every key rank the keys; the best ones are read whole."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from prehoc.config import DEFAULT_LOCAL, DEFAULT_SINK, Budget, check_choice, check_int
from prehoc.kernels.reference import ranked
from prehoc.methods._retrieval import Middle, as_selection, cover, retrieve_lists
from prehoc.selection import Decision, Plan, State, Step

FORMAT = "prehoc double-sparsity channels 1"
SHARE = 8  # label channels by default: the head dimension divided by this
SPARE = 256  # columns of labels that are allocated ahead


@dataclasses.dataclass(frozen=True)
class DoubleSparsity:
    """Rank the keys of the middle by q.k over a few label channels at every step, and read the best of them exactly.

    Source: arXiv 2408.07092. The label channels of a KV head are those of the largest variance among the row's prompt keys, or
    those that a calibration file of ``prehoc tune double-sparsity`` ranks first.

    Parameters
    ----------
    budget, ratio, critical
        The size, as in `prehoc.config.Budget`; ratio 1/8, at least 256 keys, when none is given.
    sink, local : int
        First and last keys that are always read.
    channels : int, optional
        Label channels of a key (None: an eighth of the head dimension).
    calibration : str, optional
        File with the order of the channels; None: no calibration.
    granularity : {"kv_head", "query_head"}
        One set per KV head or per query head.

    Raises
    ------
    ValueError
        When the sizes contradict each other or are too small, or the file is missing or is not a calibration.
    """

    name: ClassVar[str] = "double_sparsity"

    budget: int | None = None
    ratio: float | None = None
    critical: int | None = None
    sink: int = DEFAULT_SINK
    local: int = DEFAULT_LOCAL
    channels: int | None = None
    calibration: str | None = None
    granularity: Literal["kv_head", "query_head"] = "kv_head"

    def __post_init__(self) -> None:
        self.size()
        check_int("channels", self.channels, 1, optional=True)
        check_choice("granularity", self.granularity, ("kv_head", "query_head"))
        if self.calibration is not None:
            _ = self._order  # a file that cannot be used is refused before any work

    @functools.cached_property
    def _size(self) -> Budget:
        return Budget.of(self.budget, self.ratio, self.critical, None, self.sink, self.local)

    def size(self) -> Budget:
        """Return the budget."""
        return self._size

    @functools.cached_property
    def _order(self) -> Tensor:
        """Channels by falling importance, int64 ``[N, Hkv, D]``."""
        assert self.calibration is not None
        path = Path(self.calibration)
        make = f"make it with: prehoc tune double-sparsity --out {path}"
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["format"] != FORMAT:
                raise ValueError(f"format {document['format']!r}")
            order = torch.tensor(document["channels"])
            if not torch.equal(order.sort(-1).values, torch.arange(order.shape[2]).expand(order.shape)):
                raise ValueError("its channels are not permutations")
        except FileNotFoundError as error:
            raise ValueError(f"there is no calibration {str(path)!r}; {make}") from error
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{str(path)!r} is not a calibration of double_sparsity ({error}); {make}") from error
        return order

    def plan(self) -> Plan:
        """Return a plan whose selector is this configuration."""
        return Plan(selector=self)

    def decide(self, step: Step, state: State) -> Decision:
        """Return the keys whose label channels score best; every key where the budget covers the row."""
        middle = Middle.of(step, self.size(), self.granularity)
        if not any(middle.counted):
            return Decision(None, counted=middle.counted, heads=middle.heads)
        fresh = step.columns - 1 if "labels" in state else 0  # each key is read once, to be labelled
        self._label(step, state)
        channels, labels = state["channels"], state["labels"][:, :, : step.columns]
        b, h, d = step.q.shape
        q = step.q.view(b, labels.shape[1], -1, d)  # [B, Hkv, G, D]
        q = q.gather(-1, channels[:, :, None].expand(*q.shape[:3], -1))
        labelled = dataclasses.replace(step, q=q.flatten(1, 2), k=labels)  # an exact retrieval, over the labels
        indices, lengths = retrieve_lists(labelled, middle, None, self.size(), dilate=0, radius=0)
        indices, lengths = indices.view(b, middle.heads, -1), lengths.view(b, middle.heads)
        if not all(middle.counted):
            indices, lengths = cover(indices, lengths, step, middle, self.sink)
        keys = sum(step.columns - pad for pad in step.rows.pad)
        summaries = keys * labels.shape[1] * labels.shape[3] * labels.element_size() + step.key_bytes(fresh)
        return Decision(as_selection(indices, lengths), counted=middle.counted, heads=middle.heads, summaries=summaries)

    def _label(self, step: Step, state: State) -> None:
        """Keep the label channels of every key, ``[B, Hkv, columns, channels]``."""
        b, hkv, n, _ = step.k.shape
        if "labels" not in state:
            channels = state["channels"] = self._choose(step)
            state["labels"] = step.k.new_zeros((b, hkv, n + SPARE, channels.shape[2]))
            fresh = slice(0, n)
        else:
            fresh = slice(n - 1, n)
        if n > state["labels"].shape[2]:
            state["labels"] = F.pad(state["labels"], (0, 0, 0, SPARE))
        keys = step.k[:, :, fresh]
        state["labels"][:, :, fresh] = keys.gather(3, state["channels"][:, :, None].expand(-1, -1, keys.shape[2], -1))

    def _choose(self, step: Step) -> Tensor:
        """Return int64 ``[B, Hkv, channels]``: the label channels of each row, the most important first."""
        b, hkv, _, d = step.k.shape
        many = max(d // SHARE, 1) if self.channels is None else self.channels
        if many > d:
            raise ValueError(f"channels={many} exceeds the head dimension {d} of this model")
        if self.calibration is not None:
            if self._order.shape[1:] != (hkv, d) or step.layer >= len(self._order):
                raise ValueError(
                    f"calibration={self.calibration!r} was made for {tuple(self._order.shape)} layers, KV heads and channels; "
                    f"layer {step.layer} of this model has {hkv} KV heads of {d}"
                )
            return self._order[step.layer, :, :many].to(step.k.device).expand(b, -1, -1)
        spread = []
        for row, (pad, prompt) in enumerate(zip(step.rows.pad, step.rows.prompt, strict=True)):
            keys = step.k[row, :, pad : pad + prompt].float()
            spread.append(keys.var(1, correction=0))  # [Hkv, D]
        return ranked(torch.cat(spread), many).view(b, hkv, many)
