"""The microscope: decode a real text token by token and record what a method read and what it missed."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from prehoc import books, provenance
from prehoc.config import check_choice, check_int
from prehoc.files import atomic_path, check_writable
from prehoc.integrations.transformers import attach, new_cache
from prehoc.integrations.transformers.compat import cache_key
from prehoc.integrations.transformers.support import layer_kinds
from prehoc.methods import describe
from prehoc.recorder import RECORDS, TraceRecorder
from prehoc.report import without_nan
from prehoc.selection import Method

FORMAT = 1


@dataclasses.dataclass
class Trace:
    """What a method read and missed, per decode step, layer and selection head.

    With one set per KV head every mass is the mean, and every cosine the least, over the G query heads of its group.
    Sliding-window layers, listed in ``meta["sliding_layers"]``, hold NaN, -1 and False.

    Attributes
    ----------
    retained : ndarray
        float32 ``[S, N, Hs]``, attention mass of the processed keys; 1 where all are.
    oracle : ndarray
        float32 ``[S, N, Hs]``, mass of sinks, sliding local keys and the `critical` best of the whole middle. A method
        without a budget lends its oracle as many keys as it read.
    oracle_equal_keys : ndarray
        float32 ``[S, N, Hs]``, the same with as many keys in total as were processed.
    retrieved : ndarray
        bool ``[S, N, Hs]``, whether the head scored the middle in full.
    counted : ndarray
        bool ``[S, N, Hs]``, whether the middle was larger than the critical keys (enters the retrieval ratio).
    keys : ndarray
        int32 ``[S, N, Hs]``, processed keys.
    overlap : ndarray
        float32 ``[S, N, Hs]``, share of the oracle's critical keys that were read; NaN if it has none.
    cosine : ndarray
        float32 ``[S, N, Hs]``, with the anchor before any refresh; NaN if none.
    consecutive : ndarray
        float32 ``[S, N, Hs]``, with the query of the step before; NaN at the first.
    meta : dict
        Method, text, model, machine, versions, command and totals, ready for JSON.
    indices : ndarray or None
        int32 ``[S, N, Hs, Kmax]``, cache columns, -1 padding.
    q : ndarray or None
        float32 ``[S, N, H, D]``, queries after rotary embedding.
    k : ndarray or None
        float32 ``[N, Hkv, P + S, D]``, keys.
    v : ndarray or None
        float32 ``[N, Hkv, P + S, Dv]``, values.
    tokens : ndarray or None
        str ``[P + S]``, the text of each token; the command line adds it.
    """

    retained: NDArray[np.float32]
    oracle: NDArray[np.float32]
    oracle_equal_keys: NDArray[np.float32]
    retrieved: NDArray[np.bool_]
    counted: NDArray[np.bool_]
    keys: NDArray[np.int32]
    overlap: NDArray[np.float32]
    cosine: NDArray[np.float32]
    consecutive: NDArray[np.float32]
    meta: dict[str, Any]
    indices: NDArray[np.int32] | None = None
    q: NDArray[np.float32] | None = None
    k: NDArray[np.float32] | None = None
    v: NDArray[np.float32] | None = None
    tokens: NDArray[np.str_] | None = None

    def save(self, path: str | Path) -> None:
        """Write an npz file, whole or not at all.

        Raises
        ------
        ValueError
            When the folder is missing or cannot be written.
        """
        target = Path(path)
        check_writable(target)
        arrays = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "meta"}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        with atomic_path(target) as part, part.open("wb") as file:
            np.savez(file, meta=np.array(json.dumps(self.meta, allow_nan=False)), **arrays)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a file that `save` wrote.

        Raises
        ------
        ValueError
            When the file is missing or is not a trace.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            meta = json.loads(str(arrays.pop("meta")))
            if meta["format"] != FORMAT:
                raise ValueError(f"format {meta['format']}, this version reads {FORMAT}")
            lacking = [
                f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING and f.name not in arrays
            ]
            if missing := [name for name in lacking if name != "meta"]:
                raise ValueError(f"it lacks {', '.join(missing)}")
            found = cls(meta=meta, **arrays)
            found._check_shapes()
            return found
        except FileNotFoundError as error:
            raise ValueError(f"there is no trace {str(path)!r}; make one with: prehoc trace --out {path}") from error
        except (OSError, ValueError, KeyError, TypeError, EOFError, AttributeError, BadZipFile) as error:
            reason = "it is no .npz file" if "pickle" in str(error) else error
            raise ValueError(f"{str(path)!r} is not a trace that prehoc wrote ({reason}); record it again") from error

    def _check_shapes(self) -> None:
        """Raise ValueError unless every array has the steps, layers and heads of the others."""
        for name in ("retained", "oracle", "oracle_equal_keys", "retrieved", "overlap", "cosine", "counted", "indices"):
            array = getattr(self, name)
            if array is not None and array.shape[:3] != self.keys.shape:
                raise ValueError(f"{name} has the shape {array.shape}, keys {self.keys.shape}")
        for name in ("q", "k", "v"):
            array, first = getattr(self, name), self.keys.shape[0 if name == "q" else 1]
            if array is not None and array.shape[0] != first:
                raise ValueError(f"{name} has the shape {array.shape}, keys {self.keys.shape}")

    def summary(self) -> dict[str, Any]:
        """Return means over all triples of full-attention layers, ready for JSON (None where there is nothing to say)."""
        full = self.keys >= 0
        retained, counted = _mean(self.retained), int(self.counted.sum())
        cosines = self.consecutive[np.isfinite(self.consecutive)]
        quantiles = np.quantile(cosines, (0.1, 0.5, 0.9)).tolist() if cosines.size else [None] * 3
        return {
            "triples": int(full.sum()),
            "counted_triples": counted,
            "retrieval_ratio": float(self.retrieved[self.counted].mean()) if counted else None,
            "keys": float(self.keys[full].mean()),
            "retained": retained,
            "oracle": _mean(self.oracle),
            "oracle_equal_keys": _mean(self.oracle_equal_keys),
            "beta": _mean(self.oracle - self.retained),
            "beta_equal_keys": _mean(self.oracle_equal_keys - self.retained),
            "overlap": _mean(self.overlap),
            "consecutive_cosine": dict(zip(("10%", "50%", "90%"), quantiles, strict=True)),
        }


def trace(
    model: nn.Module,
    token_ids: Sequence[int] | Tensor,
    prompt_tokens: int,
    steps: int,
    method: Method | str,
    *,
    observe: bool = False,
    record: Sequence[str] = (),
    backend: str | None = None,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Trace:
    """Prefill the first P tokens, decode the next S with the text's own tokens, and record every step of every layer.

    Parameters
    ----------
    model : Module
        A supported transformers model in eval mode.
    token_ids : sequence of int or Tensor
        At least P + S tokens; the tokenizer's special tokens are inside P.
    prompt_tokens, steps : int
        P and S.
    method : Method or str
        A configuration, or ``name:key=value,...``.
    observe : bool
        Select and record, but prefill and attend densely: every layer sees the dense model's queries and keys.
    record : sequence of {"selections", "qk", "qkv"}
        Also keep `Trace.indices`; `Trace.q` and `Trace.k`; these two and `Trace.v`.
    backend : str, optional
        Kernel backend.
    seed : int
        Written to `Trace.meta`; nothing in a trace is random.
    progress : callable, optional
        Called as ``progress(stage, done, total)``.

    Returns
    -------
    Trace

    Raises
    ------
    ValueError
        Before the model is run: too few tokens, more than the model has positions, an unsupported model or method, or
        no layer with full attention.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.long).view(1, -1)
    check_request(position_limit(model.config), ids.shape[1], prompt_tokens, steps)
    for what in record:
        check_choice("record", what, RECORDS)
    session = attach(model, method, backend=backend, audit=0.0, seed=seed, observe=observe)
    try:
        granularity = getattr(session.method, "granularity", "kv_head")
        kinds = layer_kinds(model)
        full_layers(kinds)
        recorder = TraceRecorder(session.plan, prompt_tokens, steps, len(kinds), granularity, tuple(record))
        session.recorder = recorder
        report = progress or (lambda stage, done, total: None)
        report(f"reading the prompt of {prompt_tokens} tokens", 0, 0)
        ids = ids[:, : prompt_tokens + steps].to(next(model.parameters()).device)
        for done, _ in enumerate(forced_logits(model, ids, prompt_tokens)):
            report(f"decoding {steps} tokens of the text", done, steps)
        meta = {
            "format": FORMAT,
            "method": describe(session.method),
            "keys": {
                f.name: getattr(session.method, f.name)
                for f in dataclasses.fields(session.method)  # type: ignore[arg-type]
            },
            "granularity": granularity,
            "observe": observe,
            "prompt_tokens": prompt_tokens,
            "steps": steps,
            "oracle": dataclasses.asdict(recorder.sizes),
            "layers": len(kinds),
            "sliding_layers": [i for i, kind in enumerate(kinds) if kind == "sliding_attention"],
            "scale": {str(layer): scale for layer, scale in recorder.scale.items()},
            "model": {"class": type(model).__name__, "dtype": str(model.dtype).removeprefix("torch.")},
            "backend": session.backend,
            "seed": seed,
            "machine": provenance.machine(),
            "versions": provenance.versions(),
            "totals": without_nan(books.as_dict(session.books)),
        }
        return Trace(meta=meta, **recorder.arrays())
    finally:
        session.detach()


@torch.no_grad()
def forced_logits(model: Any, ids: Tensor, prompt_tokens: int) -> Iterator[Tensor]:
    """Read ``ids[:, :P]`` in one forward, then the rest one token at a time; yield the logits ``[1, V]`` of each forward.

    Parameters
    ----------
    model : Module
        A transformers model with a session attached.
    ids : Tensor
        int64 ``[1, P + S]``.
    prompt_tokens : int
        P.
    """
    cache = new_cache(model.config, ids.shape[1])
    name = cache_key({}, model)
    last = last_only(model)
    ends = range(prompt_tokens, ids.shape[1] + 1)
    for begin, end in zip((0, *ends), ends, strict=False):
        out = model(input_ids=ids[:, begin:end], use_cache=True, **{name: cache}, **last)
        yield out.logits[:, -1]


def last_only(model: Any) -> dict[str, int]:
    """Return the arguments that spare a model all logits but the last token's; none where it has no such argument."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def position_limit(config: Any) -> int | None:
    """Return how many positions a model has; None where its configuration does not say."""
    limit: int | None = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit


def check_request(limit: int | None, tokens: int, prompt_tokens: int, steps: int) -> None:
    """Raise ValueError unless P and S are at least 1, and P + S at most the tokens of the text and the model's positions."""
    check_int("prompt_tokens", prompt_tokens, 1)
    check_int("steps", steps, 1)
    need = prompt_tokens + steps
    if limit is not None and need > limit:
        raise ValueError(
            f"{prompt_tokens} prompt tokens + {steps} steps exceed the model's {limit} positions; lower their sum to {limit}"
        )
    if tokens < need:
        raise ValueError(
            f"the text has {tokens} tokens, but {prompt_tokens} prompt tokens + {steps} steps need {need}; "
            "give a longer text or lower one of them"
        )


def full_layers(kinds: Sequence[str]) -> list[int]:
    """Return the numbers of the layers with full attention; ValueError when there is none."""
    full = [i for i, kind in enumerate(kinds) if kind != "sliding_attention"]
    if not full:
        raise ValueError(f"none of the model's {len(kinds)} layers has full attention to select in; take another model")
    return full


def _mean(values: NDArray[np.float32]) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean(dtype=np.float64)) if finite.size else None
