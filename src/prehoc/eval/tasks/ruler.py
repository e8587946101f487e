"""RULER's thirteen tasks, generated at any length with the model's own tokenizer."""

from __future__ import annotations

import dataclasses
import math
import random
import string
from collections.abc import Callable
from typing import Any

from prehoc.eval.scoring import found_any, found_share
from prehoc.eval.tasks import haystack
from prehoc.eval.tasks.base import Context, Loaded, Metric, Sample, Task, text, texts

_HOPS = 4
Build = Callable[[random.Random, int], Sample]


@dataclasses.dataclass(frozen=True)
class _Ruler(Task):
    """Share of the expected strings in the output; every sample is the largest that fits the length."""

    def load(self, context: Context) -> Loaded:
        """Build the samples from the files below ``ruler``."""
        length = context.length or haystack.LENGTH
        build, notes = self.maker(context, length)

        def sample(number: int) -> Sample:
            def sized(size: int) -> Sample:
                return build(random.Random(f"{context.seed}/{self.name}/{number}"), size)

            found = haystack.largest(context, self.name, length, self.chat, self.new_tokens, sized)
            return dataclasses.replace(found, id=f"{length}-{number}")

        count = haystack.SAMPLES if context.limit is None else context.limit
        return Loaded([sample(i) for i in range(count)], notes=notes)

    def maker(self, context: Context, length: int) -> tuple[Build, tuple[str, ...]]:
        """Return what builds a sample of a size, and notes about the data."""
        raise NotImplementedError

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """Look for the expected strings."""
        return {"found": found_share(output, sample.answers)}


@dataclasses.dataclass(frozen=True)
class NIAH(_Ruler):
    """Needles "One of the special magic ... for KEY is: VALUE." in a haystack."""

    hay: str = "prose"
    key: haystack.Kind = "words"
    value: haystack.Kind = "numbers"
    keys: int = 1
    values: int = 1
    asked: int = 1

    def maker(self, context: Context, length: int) -> tuple[Build, tuple[str, ...]]:
        """Return the builder; only a prose haystack reads sentences."""
        words = haystack.vocabulary(context)
        sentences, name = haystack.prose(context) if self.hay == "prose" else ([], "")

        def needle(key: str, value: str) -> str:
            return f"One of the special magic {self.value} for {key} is: {value}."

        def build(rng: random.Random, size: int) -> Sample:
            keys = haystack.draw_distinct(self.keys, lambda: haystack.draw_value(rng, self.key, words))
            held = {
                key: haystack.draw_distinct(self.values, lambda: haystack.draw_value(rng, self.value, words))
                for key in keys
            }
            needles = [needle(key, value) for key, values in held.items() for value in values]
            rng.shuffle(needles)
            depths = haystack.depths(rng, len(needles))
            asked = rng.sample(keys, self.asked)
            expected = tuple(value for key in asked for value in held[key])
            if self.hay == "needles":
                filler = [
                    needle(haystack.draw_value(rng, self.key, words), haystack.draw_value(rng, self.value, words))
                    for _ in range(size)
                ]
            else:
                filler = [haystack.NOISE] * size if self.hay == "noise" else haystack.cycle(sentences, size)
            joined = (" " if self.hay == "prose" else "\n").join(haystack.insert(filler, needles, depths))
            return self._sample(joined, asked, expected)

        return build, (f"haystack: {name}",) if name else ()

    def _sample(self, hay: str, asked: list[str], expected: tuple[str, ...]) -> Sample:
        several = len(expected) > 1
        noun = self.value if several else self.value.removesuffix("s")
        some = f"Some special magic {noun} are" if several else f"A special magic {noun} is"
        names = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
        head = (
            f"{some} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {noun} afterwards.\n"
        )
        ask = "What are all" if several else "What is"
        question = f"\n{ask} the special magic {noun} for {names} mentioned in the provided text?"
        verb = "are" if several else "is"
        prefix = f" The special magic {noun} for {names} mentioned in the provided text {verb}"
        return Sample("", head + hay, question, prefix, expected)


@dataclasses.dataclass(frozen=True)
class VariableTracking(_Ruler):
    """The five variables of one chain of assignments in noise, after a solved example."""

    def maker(self, context: Context, length: int) -> tuple[Build, tuple[str, ...]]:
        """Return the builder; no data is read."""

        def build(rng: random.Random, size: int) -> Sample:
            document, question, prefix, names = self._parts(rng, min(size, 5))
            example = f"{document}{question}{prefix}{' '.join(names)}\n\n"
            document, question, prefix, names = self._parts(rng, size)
            return Sample("", example + document, question, prefix, names)

        return build, ()

    def _parts(self, rng: random.Random, lines: int) -> tuple[str, str, str, tuple[str, ...]]:
        names = haystack.draw_distinct(_HOPS + 1, lambda: "".join(rng.choices(string.ascii_uppercase, k=5)))
        value = rng.randrange(10000, 99999)
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {new} = VAR {old}" for old, new in zip(names, names[1:], strict=False)]
        places = sorted(rng.random() for _ in chain)
        hay = "\n".join(haystack.insert([haystack.NOISE] * lines, chain, places))
        head = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        question = f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
        prefix = (
            " Answer: According to the chain(s) of variable assignment in the text above, "
            f"{len(names)} variables are assigned the value {value}, they are: "
        )
        return head + hay, question, prefix, tuple(names)


@dataclasses.dataclass(frozen=True)
class CommonWords(_Ruler):
    """The ten words of a numbered list that come 30 times (below 4k tokens 6), the others 3 times (1)."""

    def maker(self, context: Context, length: int) -> tuple[Build, tuple[str, ...]]:
        """Return the builder, over all word lists."""
        lists = haystack.vocabulary(context)
        words = sorted({word for some in lists.values() for word in some})
        often, seldom = (30, 3) if length >= 4096 else (6, 1)

        def parts(rng: random.Random, others: int, often: int, seldom: int) -> tuple[str, tuple[str, ...]]:
            drawn = rng.sample(words, min(10 + others, len(words)))
            entries = [word for word in drawn[:10] for _ in range(often)]
            entries += [word for word in drawn[10:] for _ in range(seldom)]
            rng.shuffle(entries)
            listed = " ".join(f"{i}. {word}" for i, word in enumerate(entries, 1))
            head = (
                "Below is a numbered list of words. In these words, some appear more often than others. "
                "Memorize the ones that appear most often.\n"
            )
            return head + listed, tuple(drawn[:10])

        question = "\nQuestion: What are the 10 most common words in the above list?"
        prefix = " Answer: The top 10 words that appear most often in the list are:"

        def build(rng: random.Random, size: int) -> Sample:
            document, answers = parts(rng, 30, 10, 3)
            solved = " ".join(f"{i}. {word}" for i, word in enumerate(answers, 1))
            example = f"{document}{question}{prefix} {solved}\n\n"
            document, answers = parts(rng, size, often, seldom)
            return Sample("", example + document, question, prefix, answers)

        return build, ()


@dataclasses.dataclass(frozen=True)
class FrequentWords(_Ruler):
    """Ranks two to four of coded words whose counts follow Zipf's law; the first rank is written as dots."""

    def maker(self, context: Context, length: int) -> tuple[Build, tuple[str, ...]]:
        """Return the builder; no data is read."""

        def build(rng: random.Random, size: int) -> Sample:
            many = max(length // 50, 4)
            words = haystack.draw_distinct(many, lambda: "".join(rng.choices(string.ascii_lowercase, k=6)))
            zeta = math.pi**2 / 6
            entries: list[str] = []
            for rank, word in enumerate(words, 1):
                entries += ["..." if rank == 1 else word] * int(size / (rank**2 * zeta))
            rng.shuffle(entries)
            head = (
                "Read the following coded text and track the frequency of each coded word. "
                "Find the three most frequently appeared coded words. "
            )
            question = (
                "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
                "What are the three most frequently appeared words in the above coded text?"
            )
            prefix = " Answer: According to the coded text above, the three most frequently appeared words are:"
            return Sample("", head + " ".join(entries), question, prefix, tuple(words[1:4]))

        return build, ()


@dataclasses.dataclass(frozen=True)
class Questions(_Ruler):
    """A question over documents of which few are needed: 1 if any reference occurs in the output."""

    file: str = "squad"

    def maker(self, context: Context, length: int) -> tuple[Build, tuple[str, ...]]:
        """Return the builder, over the paragraphs of ``ruler/squad*.jsonl`` or ``ruler/hotpotqa*.jsonl``."""
        rows = [row.read() for row in context.source.rows((f"ruler/{self.file}*.jsonl", f"{self.file}*.jsonl"))]
        asks = _squad(rows) if self.file == "squad" else _hotpot(rows)
        paragraphs = list(dict.fromkeys(document for _, _, gold, others in asks for document in (*gold, *others)))
        order = list(range(len(asks)))
        head = "Answer the question based on the given documents. Only give me the answer and do not output any other words."

        def build(rng: random.Random, size: int) -> Sample:
            question, answers, gold, near = asks[rng.choice(order)]
            known = {*gold, *near}
            rest = [one for one in paragraphs if one not in known]
            documents = [*gold, *[*near, *rng.sample(rest, min(max(size - len(near), 0), len(rest)))][:size]]
            rng.shuffle(documents)
            listed = "\n\n".join(f"Document {i}:\n{document}" for i, document in enumerate(documents, 1))
            start = f"{head}\n\nThe following are given documents.\n\n{listed}"
            return Sample("", start, f"\n\n{head}\n\nQuestion: {question}", " Answer:", answers)

        return build, ()

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """Look for any reference."""
        return {"found": found_any(output, sample.answers)}


_Question = tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]


def _squad(rows: list[Any]) -> list[_Question]:
    """Return (question, answers, its paragraph, none) of every answerable question."""
    return [
        (text(one, "question"), tuple(dict.fromkeys(texts(one, "answers"))), (text(row, "context"),), ())
        for row in rows
        for one in row["qas"]
    ]


def _hotpot(rows: list[Any]) -> list[_Question]:
    """Return (question, answer, gold paragraphs, the row's other paragraphs)."""
    found: list[_Question] = []
    for row in rows:
        titles = {title for title, _ in row["supporting_facts"]}
        documents = [(title, f"{title}\n{''.join(sentences)}") for title, sentences in row["context"]]
        gold = tuple(document for title, document in documents if title in titles)
        others = tuple(document for title, document in documents if title not in titles)
        found.append((text(row, "question"), (text(row, "answer"),), gold, others))
    return found


_FOUND = (Metric("found"),)


def _niah(name: str, **how: Any) -> NIAH:
    return NIAH(f"ruler_niah_{name}", _FOUND, 128, chat=True, **how)


TASKS: tuple[Task, ...] = (
    _niah("single_1", hay="noise"),
    _niah("single_2"),
    _niah("single_3", value="uuids"),
    _niah("multikey_1", keys=4),
    _niah("multikey_2", hay="needles"),
    _niah("multikey_3", hay="needles", key="uuids", value="uuids"),
    _niah("multivalue", values=4),
    _niah("multiquery", keys=4, asked=4),
    VariableTracking("ruler_vt", _FOUND, 30, chat=True),
    CommonWords("ruler_cwe", _FOUND, 120, chat=True),
    FrequentWords("ruler_fwe", _FOUND, 50, chat=True),
    Questions("ruler_qa_1", _FOUND, 32, chat=True),
    Questions("ruler_qa_2", _FOUND, 32, chat=True, file="hotpotqa"),
)
