"""Golden samples of every score, computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from prehoc.eval import scoring
from prehoc.eval.scoring import ScoreError


def test_normalisation_is_squads() -> None:
    assert scoring.normalise("The  Cat, an ANT's a-b theatre.") == "cat ants ab theatre"


@pytest.mark.parametrize(
    ("output", "reference", "f1", "em"),
    [
        ("The cat sat", "a cat", 2 * 1 / (2 + 1), 0.0),  # "cat sat" against "cat"
        ("Paris.", "paris", 1.0, 1.0),
        ("b b c", "b c c", 2 * 2 / 6, 0.0),  # shared as multisets: one b, one c
        ("", "yes", 0.0, 0.0),
        ("no", "yes", 0.0, 0.0),
    ],
)
def test_f1_and_exact_match(output: str, reference: str, f1: float, em: float) -> None:
    assert scoring.token_f1(output, reference) == pytest.approx(f1)
    assert scoring.exact_match(output, reference) == em


def test_the_best_reference_counts() -> None:
    assert scoring.best(scoring.token_f1, "red car", ["blue", "car", "red car"]) == 1.0
    with pytest.raises(ScoreError, match="no reference"):
        scoring.best(scoring.token_f1, "x", [])


def test_coqa_leaves_each_reference_out_in_turn() -> None:
    # without "yes": 0 ("no", "maybe"); without "no": 1; without "maybe": 1
    assert scoring.leave_one_out(scoring.exact_match, "yes", ["yes", "no", "maybe"]) == pytest.approx(2 / 3)
    assert scoring.leave_one_out(scoring.exact_match, "yes", ["yes"]) == 1.0


@pytest.mark.parametrize(
    ("output", "reference", "recall", "precision"),
    [
        ("the cat sat", "the cat sat", 1.0, 1.0),
        ("a b c d", "a x b", 2 / 3, 2 / 4),
        ("a a a", "a b", 1 / 2, 1 / 1),  # distinct words
        # pooled over sentences: "w1 w2" and "w1 w3 w5" of five words; the output has w1 w2 w3 w5 w6 w7 w8 w9
        ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5.", "w1 w2 w3 w4 w5", 4 / 5, 4 / 8),
        # ten distinct words "A cat was on the mat It sat there happily", nine in the output, seven found
        ("The cat sat on the mat. It was happy.", "A cat was on the mat. It sat there happily.", None, None),
    ],
)
def test_rouge_l(output: str, reference: str, recall: float | None, precision: float | None) -> None:
    expected = 0.7368421002770082  # of the package rouge 1.0.1
    if recall is not None and precision is not None:
        expected = 2 * recall * precision / (recall + precision)
    assert scoring.rouge_l(output, reference) == pytest.approx(expected, abs=1e-7)


def test_rouge_l_of_nothing() -> None:
    assert scoring.rouge_l(" . ", "a b") == 0.0
    assert scoring.rouge_l("x", "a b") == 0.0
    with pytest.raises(ScoreError, match="has no word"):
        scoring.rouge_l("a", " . ")


@pytest.mark.parametrize(
    ("output", "classes", "expected"),
    [
        ("City", ["City", "Food"], 1.0),
        ("City or Food", ["City", "Food"], 0.5),
        ("Food", ["City", "Food"], 0.0),
        # "City" is part of "City name": dropped
        ("City name", ["City", "City name"], 1.0),
        # the name behind a dropped one is skipped: "name" stays and halves the score
        ("City name", ["City", "name", "City name"], 0.5),
    ],
)
def test_classification(output: str, classes: list[str], expected: float) -> None:
    reference = "City name" if "City name" in classes else "City"
    assert scoring.classification(output, reference, classes) == expected


def test_numbers() -> None:
    assert scoring.numbers_equal("Paragraph 12 or 3", "12") == 0.5
    assert scoring.numbers_equal("none", "12") == 0.0
    assert scoring.numbers_equal("112", "12") == 0.0


def test_code_similarity_takes_the_first_line_of_code() -> None:
    assert scoring.code_similarity("\n```python\n# note\nreturn x\nreturn y", "return x") == 1.0
    # "abcd" and "bcde" share "bcd": 2 * 3 / 8
    assert scoring.code_similarity("abcd", "bcde") == 0.75
    assert scoring.code_similarity("# only a comment", "return x") == 0.0


def test_found() -> None:
    assert scoring.found_share("it is ABC and 12", ["abc", "13"]) == 0.5
    assert scoring.found_any("it is ABC", ["x", "abc"]) == 1.0
    assert scoring.found_any("it is ABC", ["x"]) == 0.0


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so 3 + 4 = 7\n#### 7", 7.0, 7.0),
        ("#### $1,234", 1234.0, 1234.0),
        ("it is 12 apples, not 5.", None, 5.0),
        ("the total is -3.50 dollars", None, -3.5),
        ("#### -8 then 9", -8.0, 9.0),
        ("no idea", None, None),
    ],
)
def test_final_number(text: str, strict: float | None, flexible: float | None) -> None:
    assert scoring.final_number(text, strict=True) == strict
    assert scoring.final_number(text, strict=False) == flexible


@pytest.mark.parametrize(
    ("output", "first", "last"),
    [
        ("The correct answer is (B).", "B", "B"),
        ("**The correct answer is C**", "C", "C"),
        ("The correct answer is A. No: The correct answer is (D)", "D", "D"),  # the bracketed form goes first
        ("The correct answer is (A). No: The correct answer is (D)", "A", "D"),
        ("B", None, None),
    ],
)
def test_choice(output: str, first: str | None, last: str | None) -> None:
    assert scoring.choice(output) == first
    assert scoring.choice(output, last=True) == last


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda: scoring.token_f1("x", "The."), "empty once articles"),
        (lambda: scoring.code_similarity("x", ""), "is empty"),
        (lambda: scoring.classification("x", "c", ["a"]), "none of the 1 classes"),
        (lambda: scoring.found_share("x", []), "is empty"),
        (lambda: scoring.found_any("x", ["a", ""]), "is empty"),
    ],
)
def test_what_cannot_be_scored_is_an_error(score: Callable[[], Any], message: str) -> None:
    with pytest.raises(ScoreError, match=message):
        score()
