"""CoQA: a conversation about a story; every turn is a sample, with the turns before it as they should have been."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from prehoc.eval.scoring import exact_match, leave_one_out, token_f1
from prehoc.eval.tasks.base import Context, Fault, Loaded, Metric, MissingData, Row, Sample, Task, text, texts


@dataclasses.dataclass(frozen=True)
class CoQA(Task):
    """F1 and exact match of the first line of the answer, after SQuAD's normalisation.

    Of several references each is left out in turn and the best of the rest counts. A row is a story with its questions and
    answers, in the release's JSON, as on the hub, or one story a line.
    """

    def load(self, context: Context) -> Loaded:
        """Read ``coqa/*.jsonl`` (a story a line), the official ``coqa/coqa-dev*.json``, or the hub."""
        loaded = self.gather(self._rows(context), self._parse)
        return dataclasses.replace(loaded, samples=context.draw(loaded.samples, self.name))

    def _rows(self, context: Context) -> list[Row]:
        try:
            return list(context.source.rows(("coqa/*.jsonl",), ("stanfordnlp/coqa", None, "validation")))
        except MissingData:
            if context.source.folder is None:
                raise
        path = context.source.find("coqa/*.json", "coqa-dev*.json")
        try:
            stories = json.loads(path.read_text(encoding="utf-8"))["data"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(str(Fault(path.name, 1, f"it is not CoQA's JSON ({error})"))) from error
        return [Row(f"{path.name}, story", number, story) for number, story in enumerate(stories, 1)]

    def _parse(self, row: Mapping[str, Any], line: int) -> list[Sample]:
        questions, references = _turns(row)
        document, talk, samples = f"{text(row, 'story')}\n\n", "", []
        for turn, (question, answers) in enumerate(zip(questions, references, strict=True), 1):
            ask = f"{talk}Q: {question}\n\nA:"
            samples.append(Sample(f"{row.get('id', line)}-{turn}", document, ask, answers=answers))
            talk = f"{ask} {answers[0]}\n\n"
        return samples

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """Score the first line of the output."""
        line = output.strip().split("\n")[0]
        return {
            "f1": leave_one_out(token_f1, line, sample.answers),
            "em": leave_one_out(exact_match, line, sample.answers),
        }


def _turns(row: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the questions, and per question its references, the conversation's own first."""
    if row["questions"] and isinstance(row["questions"][0], Mapping):  # the release
        questions = tuple(text(one, "input_text") for one in row["questions"])
        lists = [row["answers"], *row.get("additional_answers", {}).values()]
        columns = [tuple(text(one, "input_text") for one in answers) for answers in lists]
    else:
        answers = row["answers"]["input_text"] if isinstance(row["answers"], Mapping) else row["answers"]
        questions, columns = texts(row, "questions"), [texts({"answers": answers}, "answers")]
    if any(len(column) != len(questions) for column in columns):
        raise ValueError(f"it has {len(questions)} questions and {len(columns[0])} answers")
    return questions, list(zip(*columns, strict=True))


_METRICS = (Metric("f1", plausible=(1.0, 100.0)), Metric("em"))
TASKS: tuple[Task, ...] = (CoQA("coqa", _METRICS, 64, stop=("\nQ:",), cuttable=False),)
