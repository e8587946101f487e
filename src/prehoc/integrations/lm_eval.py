"""lm-evaluation-harness: ``--model prehoc``, every task of it under a method.

The harness finds the model once this module was imported; ``python -m prehoc.integrations.lm_eval`` is its command line with
that done: ``--model prehoc --model_args pretrained=MODEL,method=cis,budget=1024 --tasks ...``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from prehoc import models
from prehoc.books import Traffic
from prehoc.eval.engine import Ask, Engine
from prehoc.integrations.transformers import attach, sparsify
from prehoc.methods import METHODS, PRESETS, describe, parse_method

_Request = tuple[Any, list[int], list[int]]


@register_model("prehoc")
class PrehocLM(HFLM):  # type: ignore[misc]
    """A transformers model that generates and scores under a method.

    Continuations are scored by teacher-forced decode, the last token of their context included: one forward over all of them
    would be a prefill, and silently dense. Requests with equal contexts share one prefill.

    Parameters
    ----------
    pretrained : str
        As for `prehoc.models.resolve` (GGUF files excepted).
    method : str
        ``name``, or ``name:key=value``.
    audit : float
        Share of decode triples whose retained mass is measured.
    **arguments
        Keys of the method (``budget=1024``); every other one is `HFLM`'s.

    Raises
    ------
    ValueError
        For an unknown method or key, or a model that does not support it.
    """

    def __init__(self, pretrained: str, method: str = "cis", audit: float = 0.01, **arguments: Any) -> None:
        name = method.partition(":")[0].strip().lower()
        fields = METHODS.get(PRESETS[name][0] if name in PRESETS else name)
        keys = {field.name for field in dataclasses.fields(fields)} if fields is not None else set()
        own = {key: arguments.pop(key) for key in keys & arguments.keys()}
        self.method = parse_method(method, own)
        source = models.resolve(pretrained)
        if source.kind == "gguf":
            raise ValueError(f"{pretrained} is a GGUF file: give its folder, as prehoc pull makes one, or a hub id")
        super().__init__(pretrained=str(source.path), **arguments)
        attach(self.model, self.method, audit=audit).detach()
        self._audit = audit
        self.traffic = Traffic()
        self.masses: list[float] = []

    def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
        with sparsify(self.model, self.method, audit=self._audit) as session:
            out = super()._model_generate(*args, **kwargs)
            session.books.flush()
            self._book(session.books.traffic, session.books.audited().tolist())
            return out

    def _loglikelihood_tokens(
        self, requests: list[_Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        by_context: dict[tuple[int, ...], list[int]] = {}
        for i, (_, whole, continuation) in enumerate(requests):
            kept = tuple(whole[-max(self.max_length - len(continuation), 1) :])
            by_context.setdefault(kept, []).append(i)
        engine, answers = Engine(self.model, audit=self._audit), {}
        for context, numbers in by_context.items():
            # the last token of the context is decoded too, so that the first scored one is the method's
            read, last = (context[:-1], context[-1:]) if len(context) > 1 else (context, ())
            asks = [Ask((*last, *requests[i][2]), score=True) for i in numbers]
            prompt = engine.prefill(self.method, [read], max(ask.columns for ask in asks))
            for i, ask in zip(numbers, asks, strict=True):
                batch = engine.decode(self.method, prompt, [ask], ended=lambda tokens: None)
                (row,) = batch.rows
                self._book(batch.traffic, row.masses)
                target = list(requests[i][2])
                answers[i] = (-math.fsum(row.nll[len(last) :]), row.tokens[len(last) :] == target)
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], answers[i])
        return [answers[i] for i in range(len(requests))]

    def _book(self, traffic: Traffic, masses: Any) -> None:
        both = zip(dataclasses.astuple(self.traffic), dataclasses.astuple(traffic), strict=True)
        self.traffic = Traffic(*(a + b for a, b in both))
        self.masses += masses

    def get_model_info(self) -> dict[str, Any]:
        """Return the harness's facts of the model, with the method and what its decode steps read."""
        found = {
            "method": describe(self.method),
            **self.traffic.to_dict(),
            "retained_mass": math.fsum(self.masses) / len(self.masses) if self.masses else None,
            "audited": len(self.masses),
        }
        return {**super().get_model_info(), "prehoc": found}


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
