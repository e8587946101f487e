"""LongBench v2: multiple choice over long documents, answered directly or after reasoning."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from prehoc.eval.scoring import ScoreError, choice
from prehoc.eval.tasks.base import Context, Loaded, Metric, Sample, Task, text

_HEAD = "Please read the following text and answer the question below.\n\n<text>\n"
_FORM = 'Format your response as follows: "The correct answer is (insert answer here)".'
_REASON = "Think about it step by step, then end with the answer in one sentence.\n"


@dataclasses.dataclass(frozen=True)
class LongBench2(Task):
    """1 if the letter that the answer states is right; none is wrong. Guessing gives 25.

    With `reason` the model thinks and answers in one go (the official script asks a second time, without the document, which
    would not exercise a decode method); its last statement counts.
    """

    reason: bool = False

    def load(self, context: Context) -> Loaded:
        """Read ``longbench_v2/*.jsonl`` (or the hub)."""

        def parse(row: Mapping[str, Any], line: int) -> list[Sample]:
            choices = "\n".join(f"({letter}) {text(row, f'choice_{letter}').strip()}" for letter in "ABCD")
            ask = f"What is the correct answer to this question: {text(row, 'question').strip()}\nChoices:\n{choices}"
            document = f"{_HEAD}{text(row, 'context').strip()}\n</text>\n\n"
            form = (_REASON if self.reason else "") + _FORM
            tags = {"difficulty": row.get("difficulty"), "length": row.get("length")}
            answers = (text(row, "answer"),)
            return [Sample(str(row.get("_id", line)), document, f"{ask}\n\n{form}", answers=answers, tags=tags)]

        rows = context.source.rows(("longbench_v2/*.jsonl",), ("THUDM/LongBench-v2", None, "train"))
        loaded = self.gather(rows, parse)
        return dataclasses.replace(loaded, samples=context.draw(loaded.samples, self.name))

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """Compare the stated letter."""
        (letter,) = sample.answers
        if letter not in ("A", "B", "C", "D"):
            raise ScoreError(f"its answer {letter!r} is none of A, B, C, D")
        return {"accuracy": float(choice(output, last=self.reason) == letter)}


_METRICS = (Metric("accuracy", floor=25.0),)
TASKS: tuple[Task, ...] = (
    LongBench2("longbench2", _METRICS, 128, chat=True, split="difficulty"),
    LongBench2("longbench2_cot", _METRICS, 1024, chat=True, split="difficulty", reason=True),
)
