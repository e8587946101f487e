"""GSM8K: grade-school mathematics, five solved examples as plain text, or zero-shot as a chat turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from prehoc.eval.scoring import ScoreError, final_number
from prehoc.eval.tasks.base import Context, Loaded, Metric, Sample, Task, text

_HUB = "openai/gsm8k"
_ZERO_SHOT = "Solve the following problem step by step. Write the final number behind '#### ' on the last line.\n\n"


@dataclasses.dataclass(frozen=True)
class GSM8K(Task):
    """The number an answer ends in.

    ``flexible`` takes the last number of the output, ``strict`` the one behind ``####``; commas and dollar signs do not count.
    """

    shots: int = 5

    def load(self, context: Context) -> Loaded:
        """Read ``gsm8k/test.jsonl``, and ``gsm8k/train*.jsonl`` for the examples (the first ones)."""
        head = self._examples(context) if self.shots else _ZERO_SHOT

        def parse(row: Mapping[str, Any], line: int) -> list[Sample]:
            question = f"Question: {text(row, 'question')}" + ("\nAnswer:" if self.shots else "")
            return [Sample(f"test-{line}", head, question, answers=(text(row, "answer"),))]

        names = ("gsm8k/test.jsonl", "test.jsonl")
        loaded = self.gather(context.source.rows(names, (_HUB, "main", "test")), parse)
        return dataclasses.replace(loaded, samples=context.draw(loaded.samples, self.name))

    def _examples(self, context: Context) -> str:
        rows = context.source.rows(("gsm8k/train*.jsonl", "train*.jsonl"), (_HUB, "main", "train"))
        shots = [
            f"Question: {text(row, 'question')}\nAnswer: {text(row, 'answer')}"
            for _, row in zip(range(self.shots), (row.read() for row in rows), strict=False)
        ]
        if len(shots) < self.shots:
            raise ValueError(f"the training file of GSM8K has {len(shots)} rows, {self.shots} examples are needed")
        return "\n\n".join(shots) + "\n\n"

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """Compare the last and the marked number with the reference's."""
        expected = final_number(sample.answers[0], strict=True)
        if expected is None:
            raise ScoreError("its answer has no number behind '####'")
        return {
            "flexible": float(final_number(output, strict=False) == expected),
            "strict": float(final_number(output, strict=True) == expected),
        }


_METRICS = (Metric("flexible"), Metric("strict"))
TASKS: tuple[Task, ...] = (
    GSM8K("gsm8k", _METRICS, 256, stop=("\n\n", "Question:"), cuttable=False),
    GSM8K("gsm8k_chat", _METRICS, 512, chat=True, shots=0, cuttable=False),
)
