"""Run the samples of a task under every method, prefilling once for all methods that share a prefill."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prehoc.eval.engine import Ask, Batch, Decoded, Engine, Prefilled
from prehoc.eval.prompts import Encoder, Prompt
from prehoc.eval.results import Line, Results
from prehoc.eval.tasks.base import Loaded, Sample, Task
from prehoc.methods import describe, prefill_key
from prehoc.selection import Method


@dataclasses.dataclass(frozen=True)
class How:
    """How samples are run.

    Parameters
    ----------
    eos : frozenset of int
        Tokens that end an answer.
    decode_question : bool
        Prefill the document only and feed the question as decode steps.
    batch : int
        Samples read and decoded together.
    seed : int
        Seed of the audit.
    """

    eos: frozenset[int]
    decode_question: bool = False
    batch: int = 1
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Item:
    """A sample with its prompt.

    Parameters
    ----------
    sample : Sample
        The sample.
    prompt : Prompt
        Its tokens.
    digest : str
        Identifies prompt and references: a line of other data is not taken for finished.
    """

    sample: Sample
    prompt: Prompt
    digest: str

    def split(self, decode_question: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens to prefill and those to feed as decode steps."""
        at = self.prompt.document if decode_question or self.sample.continuation else len(self.prompt.ids)
        return self.prompt.ids[:at], self.prompt.ids[at:]


def encode_samples(encoder: Encoder, task: Task, loaded: Loaded, decode_question: bool) -> list[Item]:
    """Return the samples of a task with their prompts; needs no model.

    Raises
    ------
    ValueError
        When a prompt does not fit, or has no document that could be prefilled before its question.
    """
    items = []
    for sample in loaded.samples:
        prompt = encoder.encode(sample, chat=task.chat, new_tokens=task.new_tokens)
        if prompt.cut and not task.cuttable:
            raise ValueError(
                f"{task.name}, sample {sample.id}: {prompt.cut} tokens too many for the {encoder.most} that are allowed, and "
                "without its middle it cannot be answered; take a model with more positions, or leave the task out"
            )
        if decode_question and not sample.ids and not 0 < prompt.document < len(prompt.ids):
            raise ValueError(
                f"{task.name}, sample {sample.id}: it has no document before its question, so that --decode-question "
                "cannot part them; leave the option or the task out"
            )
        digest = hashlib.sha256(f"{prompt.digest}{sample.answers}".encode()).hexdigest()[:16]
        items.append(Item(sample, prompt, digest))
    return items


class TaskRun:
    """The samples of one task, ready to run.

    Parameters
    ----------
    engine : Engine
        The model.
    tokenizer : PreTrainedTokenizerBase
        Its tokenizer.
    task : Task
        The task.
    items : sequence of Item
        Its samples.
    methods : sequence of Method
        Dense first.
    how : How
        How to run them.
    """

    def __init__(
        self, engine: Engine, tokenizer: Any, task: Task, items: Sequence[Item], methods: Sequence[Method], how: How
    ) -> None:
        self.engine, self.tokenizer, self.task, self.how = engine, tokenizer, task, how
        self.items, self.methods = list(items), list(methods)

    @property
    def keys(self) -> set[tuple[str, str]]:
        """Sample and digest of every item."""
        return {(item.sample.id, item.digest) for item in self.items}

    def run(self, results: Results, progress: Callable[[str, int, int], None]) -> list[Line]:
        """Run what is not finished yet and return all lines of these samples and methods."""
        names = [describe(method) for method in self.methods]
        lines = [line for line in results.read(self.task.name) if (line["sample"], line["digest"]) in self.keys]
        done = {(line["sample"], line["digest"], line["method"]) for line in lines}
        pending: dict[tuple[int, ...], list[Item]] = {}
        for item in self.items:
            lacking = [i for i, name in enumerate(names) if (item.sample.id, item.digest, name) not in done]
            if lacking:
                pending.setdefault(tuple(lacking), []).append(item)
        total = sum(len(missing) * len(items) for missing, items in pending.items())
        count = 0
        for missing, items in pending.items():
            for first in range(0, len(items), self.how.batch):
                batch = items[first : first + self.how.batch]
                for found in self._batch(batch, [self.methods[i] for i in missing]):
                    results.append(self.task.name, found)
                    lines += found
                    count += len(found)
                    progress(self.task.name, count, total)
        return [line for line in lines if line["method"] in names]

    def _batch(self, items: list[Item], methods: Sequence[Method]) -> Iterable[list[Line]]:
        """Yield the lines of a batch, method by method; dense goes first, as the reference of the others."""
        dense = self.methods[0]
        groups: dict[Any, list[Method]] = {}
        for method in dict.fromkeys([dense, *methods]):
            groups.setdefault(prefill_key(method), []).append(method)
        parts = [item.split(self.how.decode_question) for item in items]
        score = self.task.new_tokens == 0
        asks = [Ask(fed, self.task.new_tokens, score) for _, fed in parts]
        room = max(ask.columns for ask in asks)
        references: list[Decoded] | None = None
        for sharing in groups.values():
            prompt = self.engine.prefill(sharing[0], [read for read, _ in parts], room, nll=score)
            for method in sharing:
                batch = self.engine.decode(
                    method,
                    prompt,
                    asks,
                    ended=self._ended,
                    seed=self.how.seed + int(items[0].digest, 16),  # the same for all methods, another for each sample
                    references=references,
                    remember=method is dense,
                )
                if method is dense:
                    references = batch.rows
                if method in methods:
                    assert references is not None
                    yield [
                        self._line(items, i, method, prompt, parts[i][1], batch, references) for i in range(len(items))
                    ]

    def _ended(self, tokens: list[int]) -> str | None:
        if tokens[-1] in self.how.eos:
            return "eos"
        if self.task.stop and cut(self._text(tokens), self.task.stop)[1]:
            return "stop"
        return None

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _line(
        self,
        items: Sequence[Item],
        i: int,
        method: Method,
        prompt: Prefilled,
        fed: tuple[int, ...],
        batch: Batch,
        references: Sequence[Decoded],
    ) -> Line:
        item, row, many = items[i], batch.rows[i], len(items)
        if self.task.new_tokens:
            output = cut(self._text(row.tokens), self.task.stop)[0]
            scores: dict[str, float | None] = dict(self.task.score(item.sample, output))
        else:
            output = ""
            scores = {"decode": math.fsum(row.nll) / len(row.nll), "prefill": prompt.nll[i] if prompt.nll else None}
        for name, value in scores.items():
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{self.task.name}, sample {item.sample.id}, {describe(method)}: {name} is {value}")
        return {
            "sample": item.sample.id,
            "digest": item.digest,
            "method": describe(method),
            "scores": scores,
            "output": output,
            "finish": row.finish if self.task.new_tokens else "scored",
            "prompt_tokens": prompt.tokens[i],
            "fed_tokens": len(fed),
            "new_tokens": len(row.tokens) if self.task.new_tokens else 0,
            "decoded": row.steps,
            "cut_tokens": item.prompt.cut,
            "agreement": agreement(row.tokens, references[i].tokens, forced=not self.task.new_tokens),
            "kl": math.fsum(row.kl) / len(row.kl) if row.kl else None,
            "kl_steps": len(row.kl),
            "batch": items[0].sample.id,
            "batch_rows": many,
            # what a batch read is counted as one: its rows have equal shares
            "traffic": {name: value / many for name, value in _counts(batch).items()},
            "audited": len(row.masses),
            "retained_mass": math.fsum(row.masses) / len(row.masses) if row.masses else None,
            "seconds": batch.seconds / many,
            "prefill_seconds": prompt.seconds / many,
            "prefill_operations": prompt.operations / many,
            "prefill_operations_dense": prompt.operations_dense / many,
            "tags": {key: value for key, value in item.sample.tags.items() if key != "all_classes"},
        }


def _counts(batch: Batch) -> dict[str, int]:
    return {**dataclasses.asdict(batch.traffic), "bytes_read": batch.traffic.bytes_read}


def cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Return a text without leading newlines up to the first stop text, and whether there was one."""
    body = text.lstrip("\n")
    places = [place for one in stop if (place := body.find(one)) >= 0]
    return (body[: min(places)], True) if places else (body, False)


def agreement(tokens: Sequence[int], dense: Sequence[int], *, forced: bool = False) -> float:
    """Return how much of an answer is dense's: the share of its tokens before the first that differs.

    With `forced` the tokens are the likeliest ones at the steps of a given text, and every equal one counts.
    """
    if not (longest := max(len(tokens), len(dense))):
        return 1.0
    pairs = list(zip(tokens, dense, strict=False))
    if forced:
        return sum(a == b for a, b in pairs) / longest
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs)) / longest
