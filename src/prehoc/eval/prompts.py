"""From a sample to the tokens a model reads: chat template, the place where the question begins, what was cut to fit."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from prehoc.eval.tasks.base import Sample


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Tokens of one sample.

    Parameters
    ----------
    ids : tuple of int
        The whole prompt.
    document : int
        Leading tokens that belong to the document; the others are the question.
    cut : int
        Tokens left out of the document's middle.
    """

    ids: tuple[int, ...]
    document: int
    cut: int

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that identify the tokens and where they part."""
        return hashlib.sha256(repr((self.ids, self.document)).encode()).hexdigest()[:16]


class Encoder:
    """Makes prompts for one model.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        Its tokenizer.
    most : int or None
        Tokens that prompt and answer may have together; None: no limit is known.
    """

    def __init__(self, tokenizer: Any, most: int | None) -> None:
        self.tokenizer, self.most = tokenizer, most

    def encode(self, sample: Sample, *, chat: bool, new_tokens: int) -> Prompt:
        """Return the tokens of a sample; a document that is too long loses its middle.

        Parameters
        ----------
        sample : Sample
            The sample.
        chat : bool
            Put document and question into a user turn where the tokenizer has a template.
        new_tokens : int
            Tokens to leave room for.

        Raises
        ------
        ValueError
            When the question alone does not fit, or the template changes the document.
        """
        if sample.ids:
            return self._given(sample)
        prompt = self._encode(sample.document, sample, chat)
        if self.most is None or len(prompt.ids) + new_tokens <= self.most:
            return prompt
        tokens = self.tokenizer(sample.document, add_special_tokens=False, verbose=False)["input_ids"]
        room = self.most - new_tokens
        question = max(len(prompt.ids) - prompt.document, len(prompt.ids) - len(tokens))
        keep = room - question
        while keep > 0:
            # the first and last half of the room stay; the question is part of the last
            tail = max(min(room // 2 - question, keep - 1), 1)
            head = max(keep - tail, 0)
            decode = self.tokenizer.decode
            document = decode(tokens[:head]) + decode(tokens[len(tokens) - tail :])
            prompt = self._encode(document, sample, chat)
            excess = len(prompt.ids) - room
            if excess <= 0:
                return dataclasses.replace(prompt, cut=len(tokens) - keep)
            keep -= excess  # text that was cut and joined can have more tokens than it had
        raise ValueError(
            f"sample {sample.id}: the question takes {question} tokens and {new_tokens} are to be generated, more than the "
            f"{self.most} that are allowed; take a model with more positions or a larger --max-length"
        )

    def _given(self, sample: Sample) -> Prompt:
        tokens = sample.ids + sample.continuation
        if self.most is not None and len(tokens) > self.most:
            raise ValueError(f"sample {sample.id} has {len(tokens)} tokens, more than the {self.most} that are allowed")
        return Prompt(tokens, len(sample.ids), 0)

    def _encode(self, document: str, sample: Sample, chat: bool) -> Prompt:
        content = document + sample.question
        if not (chat and self.tokenizer.chat_template):
            text, boundary, special = content, len(document), True
        else:
            turn = [{"role": "user", "content": content}]
            text = self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
            special = False  # the template writes them itself
            begin = text.find(document.strip())
            if begin < 0:
                raise ValueError(
                    f"sample {sample.id}: the chat template changes the document, so that it cannot be found"
                )
            boundary = begin + len(document.strip())
        text += sample.prefix
        ids = self._tokens(text, special)
        begun = self._tokens(text[:boundary], special)
        pairs = zip(ids, begun, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(begun)))
        return Prompt(tuple(ids), shared, 0)

    def _tokens(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids
