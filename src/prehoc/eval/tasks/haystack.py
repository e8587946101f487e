"""What the generated tasks share: filler text, words, needles in sentences, and the largest prompt that fits a length."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Literal

from prehoc.eval.tasks.base import Context, MissingData, Sample

LENGTH = 4096
SAMPLES = 500
"""Samples of a generated task without a limit, as RULER has."""

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
Kind = Literal["numbers", "uuids", "words"]


def prose(context: Context) -> tuple[list[str], str]:
    """Return sentences of real prose, and what they are.

    The official haystack is ``ruler/essays/*.txt``; where it is missing, the paragraphs of ``ruler/squad*.jsonl`` stand in.
    """
    try:
        first = context.source.find("ruler/essays/*.txt", "essays/*.txt")
        text = " ".join(path.read_text(encoding="utf-8") for path in sorted(first.parent.glob("*.txt")))
        name = "essays"
    except MissingData:
        rows = context.source.rows(("ruler/squad*.jsonl", "squad*.jsonl"))
        text = " ".join(str(row.read()["context"]) for row in rows)
        name = "SQuAD paragraphs (the official essays are not in the data folder)"
    return [part for part in re.split(r"(?<=[.!?])\s+", text) if part.strip()], name


def vocabulary(context: Context) -> dict[str, list[str]]:
    """Return the word lists below ``ruler/words``: "noun", "adjective" and "verb"."""
    lists = {}
    for kind in ("noun", "adjective", "verb"):
        path = context.source.find(f"ruler/words/{kind}list.txt", f"words/{kind}list.txt")
        lists[kind] = [word for line in path.read_text(encoding="utf-8").splitlines() if (word := line.strip())]
    return lists


def draw_value(rng: random.Random, kind: Kind, words: dict[str, list[str]]) -> str:
    """Return a random number of seven digits, a UUID, or an adjective and a noun."""
    if kind == "numbers":
        return str(rng.randrange(10**6, 10**7))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return f"{rng.choice(words['adjective'])}-{rng.choice(words['noun'])}"


def draw_distinct(count: int, draw: Callable[[], str]) -> list[str]:
    """Return `count` different values."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw()] = None
    return list(found)


def cycle(sentences: Sequence[str], count: int) -> list[str]:
    """Return the first `count` sentences, from the start again when they run out."""
    return [sentences[i % len(sentences)] for i in range(count)]


def insert(sentences: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> list[str]:
    """Return the sentences with each needle at its depth in [0, 1] of the haystack."""
    out = list(sentences)
    places = sorted(zip(depths, range(len(needles)), strict=True), reverse=True)
    for depth, i in places:
        out.insert(round(depth * len(sentences)), needles[i])
    return out


def depths(rng: random.Random, count: int) -> list[float]:
    """Return different depths out of 40 equal steps from 0 to 1."""
    return [i / 39 for i in rng.sample(range(40), count)]


def largest(
    context: Context, task: str, length: int, chat: bool, new_tokens: int, build: Callable[[int], Sample]
) -> Sample:
    """Return the sample of the largest size whose prompt, with its answer, takes at most `length` tokens.

    Parameters
    ----------
    context : Context
        Counts the tokens.
    task : str
        Its name, for the error.
    length : int
        Tokens.
    chat, new_tokens
        As in the task.
    build : callable
        Makes the sample of a size (1 or more), which must grow with it.

    Raises
    ------
    ValueError
        When not even size 1 fits.
    """

    def tokens(size: int) -> int:
        return len(context.encoder.encode(build(size), chat=chat, new_tokens=0).ids) + new_tokens

    if tokens(1) > length:
        raise ValueError(f"{task}: the shortest prompt does not fit --length {length}; give a larger one")
    low, high, before = 1, 2, 0
    while before < (now := tokens(high)) <= length:  # it stops growing when the material runs out
        low, high, before = high, 2 * high, now
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tokens(middle) <= length else (low, middle)
    return build(low)
