"""Scores of an answer against its references, in [0, 1]; what cannot be scored raises, it is never a silent 0."""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class ScoreError(ValueError):
    """A metric that has no value for this row, such as one with an empty reference."""


def normalise(text: str) -> str:
    """Return a text as SQuAD compares it: lower case, without ASCII punctuation and articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def best(score: Callable[[str, str], float], output: str, references: Sequence[str]) -> float:
    """Return the highest score of an output over its references.

    Raises
    ------
    ScoreError
        When there is no reference.
    """
    if not references:
        raise ScoreError("there is no reference answer")
    return max(score(output, reference) for reference in references)


def leave_one_out(score: Callable[[str, str], float], output: str, references: Sequence[str]) -> float:
    """Return CoQA's score: each of several references is left out in turn and the best of the rest is averaged."""
    if len(references) < 2:
        return best(score, output, references)
    rest = [[*references[:i], *references[i + 1 :]] for i in range(len(references))]
    return sum(best(score, output, some) for some in rest) / len(rest)


def exact_match(output: str, reference: str) -> float:
    """Return 1 when the normalised texts are equal."""
    return float(normalise(output) == _reference(reference))


def token_f1(output: str, reference: str) -> float:
    """Return the F1 of the normalised words as multisets; 0 when none is shared."""
    ours, theirs = normalise(output).split(), _reference(reference).split()
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * shared / (len(ours) + len(theirs)) if shared else 0.0


def _reference(text: str) -> str:
    found = normalise(text)
    if not found:
        raise ScoreError(f"the reference {text!r} is empty once articles and punctuation are dropped")
    return found


def rouge_l(output: str, reference: str) -> float:
    """Return the summary-level ROUGE-L F1 as the ``rouge`` package defines it.

    Sentences end at full stops. The words of each reference sentence that lie on a longest common subsequence with some
    output sentence are pooled as a set; recall and precision divide their number by the distinct words of either text.
    An empty output scores 0.

    Raises
    ------
    ScoreError
        When the reference has no word.
    """
    ours, theirs = _sentences(output), _sentences(reference)
    if not theirs:
        raise ScoreError(f"the reference {reference!r} has no word")
    if not ours:
        return 0.0
    found: set[str] = set()
    for sentence in theirs:
        for other in ours:
            found |= set(_common_subsequence(sentence, other))
    recall = len(found) / len({word for sentence in theirs for word in sentence})
    precision = len(found) / len({word for sentence in ours for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    return [words for part in text.split(".") if (words := part.split())]


def _common_subsequence(one: Sequence[str], two: Sequence[str]) -> list[str]:
    """Return a longest common subsequence; of several, the one that drops from `one` last."""
    table = [[0] * (len(two) + 1) for _ in range(len(one) + 1)]
    for i, a in enumerate(one, 1):
        row, above = table[i], table[i - 1]
        for j, b in enumerate(two, 1):
            row[j] = above[j - 1] + 1 if a == b else max(above[j], row[j - 1])
    i, j, found = len(one), len(two), []
    while i and j:
        if one[i - 1] == two[j - 1]:
            found.append(one[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


def classification(output: str, reference: str, classes: Sequence[str]) -> float:
    """Return LongBench's score of a class name: 1 / (classes named) if the right one is among them, else 0.

    Names that are a proper part of the right one do not count. The official loop changes the list it walks over, so that a
    name right behind a dropped one is not looked at; scores are only comparable if that is kept.
    """
    if reference not in classes:
        raise ScoreError(f"the reference {reference!r} is none of the {len(classes)} classes")
    named = [name for name in classes if name in output]
    i = 0
    while i < len(named):
        if named[i] in reference and named[i] != reference:
            del named[i]
        i += 1
    return 1 / len(named) if reference in named else 0.0


def numbers_equal(output: str, expected: str) -> float:
    """Return the share of the digit groups of an output that equal `expected`; 0 without any."""
    groups = re.findall(r"\d+", output)
    return groups.count(expected) / len(groups) if groups else 0.0


def code_similarity(output: str, reference: str) -> float:
    """Return the similarity, in hundredths, of the first line of code of an output with the reference.

    The line is the first without a backtick, ``#`` or ``//``; the measure is difflib's ratio, as fuzzywuzzy has it.
    """
    if not reference:
        raise ScoreError("the reference line of code is empty")
    lines = output.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


def found_share(output: str, expected: Sequence[str]) -> float:
    """Return the share of the expected strings that occur in an output, upper and lower case alike."""
    if not expected or not all(expected):
        raise ScoreError("an expected string is empty")
    text = output.lower()
    return sum(one.lower() in text for one in expected) / len(expected)


def found_any(output: str, expected: Sequence[str]) -> float:
    """Return 1 when any expected string occurs in an output, upper and lower case alike."""
    if not expected or not all(expected):
        raise ScoreError("an expected string is empty")
    text = output.lower()
    return float(any(one.lower() in text for one in expected))


def final_number(text: str, *, strict: bool) -> float | None:
    """Return a GSM8K answer: the number behind ``####``, or (not `strict`) the last number; None without one."""
    if strict:
        marked = re.search(r"####\s*(-?\$?[\d,]*\.?\d+)", text)
        return _value(marked[1]) if marked else None
    numbers = _NUMBER.findall(text)
    return _value(numbers[-1]) if numbers else None


def _value(text: str) -> float:
    return float(text.replace(",", "").replace("$", ""))


def choice(output: str, *, last: bool = False) -> str | None:
    """Return the letter A to D that an answer states in LongBench v2's form; None without one.

    Parameters
    ----------
    output : str
        The answer; asterisks are ignored.
    last : bool
        Take the last statement, as an answer that reasons first needs.
    """
    text = output.replace("*", "")
    for pattern in (r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])"):
        found: list[str] = re.findall(pattern, text)
        if found:
            return found[-1] if last else found[0]
    return None
