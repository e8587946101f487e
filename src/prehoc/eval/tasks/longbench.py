"""LongBench (v1), the 16 English and code tasks, with the official prompts, lengths and scores."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from prehoc.eval.scoring import (
    ScoreError,
    best,
    classification,
    code_similarity,
    numbers_equal,
    rouge_l,
    token_f1,
)
from prehoc.eval.tasks.base import Context, Loaded, Metric, Sample, Task, text, texts

Score = Callable[[str, Sample], float]


def _best_f1(output: str, sample: Sample) -> float:
    return best(token_f1, output, sample.answers)


def _best_rouge(output: str, sample: Sample) -> float:
    return best(rouge_l, output, sample.answers)


def _best_code(output: str, sample: Sample) -> float:
    return best(code_similarity, output, sample.answers)


def _best_class(output: str, sample: Sample) -> float:
    classes = sample.tags["all_classes"]
    return best(lambda one, reference: classification(one, reference, classes), output, sample.answers)


def _count(output: str, sample: Sample) -> float:
    return best(numbers_equal, output, sample.answers)


def _paragraph(output: str, sample: Sample) -> float:
    def one(output: str, reference: str) -> float:
        number = re.search(r"Paragraph (\d+)", reference)
        if number is None:
            raise ScoreError(f"the reference {reference!r} names no paragraph")
        return numbers_equal(output, number[1])

    return best(one, output, sample.answers)


@dataclasses.dataclass(frozen=True)
class LongBench(Task):
    """The best score over a row's answers; ``first_line``: only the first line of the output counts.

    The prompt's template and the number of new tokens come from the release's ``dataset2prompt.json`` and
    ``dataset2maxlen.json``, which lie beside the rows.
    """

    score_one: Score = _best_f1
    first_line: bool = False

    def load(self, context: Context) -> Loaded:
        """Read ``longbench_v1/TASK.jsonl`` with its template; rows can also come from the hub."""
        name = self.name.removeprefix("longbench_")
        template = self._config(context, "dataset2prompt.json", name)
        longest = self._config(context, "dataset2maxlen.json", name)
        if longest != self.new_tokens:
            raise ValueError(f"dataset2maxlen.json gives {longest} new tokens for {name}, officially {self.new_tokens}")
        head, mark, tail = str(template).partition("{context}")
        if not mark:
            raise ValueError(f"dataset2prompt.json: the template of {name} has no {{context}}")

        def parse(row: Mapping[str, Any], line: int) -> list[Sample]:
            ask = tail.replace("{input}", text(row, "input"))
            tags = {"length": row.get("length"), "all_classes": row.get("all_classes")}
            where = str(row.get("row", line - 1))  # the index in the official file
            return [Sample(where, head + text(row, "context"), ask, answers=texts(row, "answers"), tags=tags)]

        names = (f"longbench_v1/{name}.jsonl", f"**/{name}.jsonl")
        loaded = self.gather(context.source.rows(names), parse)
        return dataclasses.replace(loaded, samples=context.draw(loaded.samples, self.name))

    def _config(self, context: Context, file: str, name: str) -> Any:
        path = context.source.find(f"longbench_v1/{file}", f"**/{file}")
        try:
            return json.loads(path.read_text(encoding="utf-8"))[name]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path.name} cannot be used for {name} ({error}); take the official file") from error

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """Score the output, or its first line."""
        if self.first_line:
            output = output.lstrip("\n").split("\n")[0]
        return {self.metrics[0].name: self.score_one(output, sample)}


_F1 = (Metric("f1", plausible=(1.0, 100.0)),)
_ROUGE = (Metric("rouge_l", plausible=(2.0, 60.0)),)
_CODE = (Metric("similarity", plausible=(5.0, 100.0)),)
_SHARE = (Metric("accuracy"),)


def _task(
    name: str,
    metrics: tuple[Metric, ...],
    new_tokens: int,
    score: Score,
    chat: bool = True,
    first_line: bool = False,
    stop: tuple[str, ...] = (),
) -> LongBench:
    return LongBench(f"longbench_{name}", metrics, new_tokens, stop, chat, score, first_line)


TASKS: tuple[Task, ...] = (
    _task("narrativeqa", _F1, 128, _best_f1),
    _task("qasper", _F1, 128, _best_f1),
    _task("multifieldqa_en", _F1, 64, _best_f1),
    _task("hotpotqa", _F1, 32, _best_f1),
    _task("2wikimqa", _F1, 32, _best_f1),
    _task("musique", _F1, 32, _best_f1),
    _task("gov_report", _ROUGE, 512, _best_rouge),
    _task("qmsum", _ROUGE, 512, _best_rouge),
    _task("multi_news", _ROUGE, 512, _best_rouge),
    _task("trec", _SHARE, 64, _best_class, chat=False, first_line=True),
    _task("triviaqa", _F1, 32, _best_f1, chat=False, first_line=True),
    _task("samsum", _ROUGE, 128, _best_rouge, chat=False, first_line=True, stop=("\n",)),
    _task("passage_count", _SHARE, 32, _count),
    _task("passage_retrieval_en", _SHARE, 32, _paragraph),
    _task("lcc", _CODE, 64, _best_code, chat=False),
    _task("repobench-p", _CODE, 64, _best_code, chat=False),
)
