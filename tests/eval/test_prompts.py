"""Prompts: template, where the question begins, and what is cut."""

from __future__ import annotations

import pytest

from eval.words import tokenizer
from prehoc.eval.prompts import Encoder
from prehoc.eval.tasks import Sample

SAMPLE = Sample("s", "w1 w2 w3\n\n", "ask w4?", " so", answers=("w5",))


@pytest.mark.parametrize("chat", [False, True])
def test_document_and_question_part_where_the_texts_do(chat: bool) -> None:
    words = tokenizer(chat)
    prompt = Encoder(words, None).encode(SAMPLE, chat=chat, new_tokens=5)
    whole = "<user> w1 w2 w3\n\nask w4? <end> <model>  so" if chat else "w1 w2 w3\n\nask w4? so"
    assert words.decode(prompt.ids) == whole
    # a template may trim, so that there the blank line belongs to the question
    assert words.decode(prompt.ids[: prompt.document]) == ("<user> w1 w2 w3" if chat else "w1 w2 w3\n\n")
    assert prompt.cut == 0


def test_without_a_template_the_prompt_is_plain() -> None:
    words = tokenizer()
    assert words.decode(Encoder(words, None).encode(SAMPLE, chat=True, new_tokens=5).ids) == "w1 w2 w3\n\nask w4? so"


@pytest.mark.parametrize("chat", [False, True])
def test_a_long_document_loses_its_middle(chat: bool) -> None:
    words = tokenizer(chat)
    document = "".join(f"w{i % 60}" for i in range(200))  # one token each
    long = Sample("s", document, "ask", " so")
    around = len(Encoder(words, None).encode(Sample("s", "w0", "ask", " so"), chat=chat, new_tokens=0).ids) - 1
    prompt = Encoder(words, 100).encode(long, chat=chat, new_tokens=10)
    assert len(prompt.ids) == 90
    kept = 90 - around
    assert prompt.cut == 200 - kept
    text = words.decode(prompt.ids)
    head, tail = "".join(f"w{i}" for i in range(30)), "".join(f"w{i % 60}" for i in range(180, 200))
    assert head in text and text[: text.index("ask")].endswith(tail)
    # the question stays whole and behind the document
    assert words.decode(prompt.ids[prompt.document :]).startswith("ask")
    # half of the room is the document's beginning, the other half ends with the question
    read = prompt.ids[prompt.document - kept : prompt.document]
    assert next(i for i, (a, b) in enumerate(zip(read, words(document)["input_ids"], strict=False)) if a != b) == 45


def test_what_cannot_fit_is_an_error() -> None:
    words = tokenizer()
    with pytest.raises(ValueError, match="the question takes 7 tokens and 10 are to be generated, more than the 12"):
        Encoder(words, 12).encode(Sample("s", "w1" * 40, "ask", " so?"), chat=False, new_tokens=10)


def test_a_template_that_changes_the_document_is_an_error() -> None:
    words = tokenizer()
    words.chat_template = "{{ messages[0]['content'] | upper }}"
    with pytest.raises(ValueError, match="the chat template changes the document"):
        Encoder(words, None).encode(SAMPLE, chat=True, new_tokens=5)


def test_given_tokens_are_taken_as_they_are() -> None:
    prompt = Encoder(tokenizer(), 10).encode(Sample("s", ids=(1, 2, 3), continuation=(4, 5)), chat=True, new_tokens=0)
    assert prompt.ids == (1, 2, 3, 4, 5) and prompt.document == 3
    with pytest.raises(ValueError, match="has 5 tokens, more than the 4"):
        Encoder(tokenizer(), 4).encode(Sample("s", ids=(1, 2, 3), continuation=(4, 5)), chat=True, new_tokens=0)


def test_digests_tell_where_the_question_begins() -> None:
    encoder = Encoder(tokenizer(), None)
    one = encoder.encode(Sample("s", "w1 ", "w2"), chat=False, new_tokens=1)
    other = encoder.encode(Sample("s", "w1", " w2"), chat=False, new_tokens=1)
    assert one.ids == other.ids and one.digest != other.digest
