"""From a text file and a question to the tokens a model reads; everything that can be wrong is found before it runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from prehoc import config, models

GAP = "\n\n[...]\n\n"
"""What stands where ``--truncate`` cut the text."""


@dataclasses.dataclass(frozen=True)
class Reader:
    """What is known of a model before its weights are loaded.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        The model's tokenizer.
    positions : int or None
        Tokens that the model can hold; None when its configuration does not say.
    """

    tokenizer: Any
    positions: int | None

    @classmethod
    def before_weights(cls, model: str, dtype: str, progress: models.Progress | None = None) -> Reader:
        """Read what a model's name says; of an unknown dtype, before anything is pulled.

        Parameters
        ----------
        model, dtype, progress
            As for `prehoc.models.load`.

        Raises
        ------
        ValueError
            For an unknown dtype, or as `prehoc.models.resolve` and `of`.
        """
        if dtype not in models.DTYPES:
            raise config.unknown("dtype", dtype, models.DTYPES)
        return cls.of(models.resolve(model, progress=progress))

    @classmethod
    def of(cls, source: models.ModelSource) -> Reader:
        """Read a model's tokenizer and configuration, not its weights.

        Raises
        ------
        ValueError
            When the files cannot be read or the hub cannot be reached.
        """
        if source.kind == "gguf":
            return cls._of_gguf(Path(source.path))
        from transformers import AutoConfig, AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(source.path)
            settings = AutoConfig.from_pretrained(source.path)
        except OSError as error:
            reason = str(error).strip().splitlines()[0]
            raise models.ModelError(
                f"cannot read the tokenizer and configuration of {source.path} ({reason})"
            ) from error
        text = settings.get_text_config(decoder=True)
        return cls(tokenizer, getattr(text, "max_position_embeddings", None))

    @classmethod
    def _of_gguf(cls, file: Path) -> Reader:
        from transformers import AutoTokenizer

        from prehoc._gguf import build_tokenizer, read_metadata

        metadata = read_metadata(file)
        tokenizer = build_tokenizer(metadata) or AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        return cls(tokenizer, metadata.get(f"{metadata['general.architecture']}.context_length"))

    def encode(self, text: str, ask: str) -> list[int]:
        """Return the tokens of the document with the question behind it, as a chat turn where the model has a template."""
        content = f"{text.rstrip()}\n\n{ask}" if ask else text
        if self.tokenizer.chat_template is None:
            ids: list[int] = self.tokenizer(content, verbose=False)["input_ids"]
            return ids
        turn = [{"role": "user", "content": content}]
        chat = self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        # the template writes the special tokens itself
        ids = self.tokenizer(chat, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def fit(self, text: str, ask: str, new_tokens: int, truncate: bool = False) -> tuple[list[int], int]:
        """Return the prompt's tokens and how many characters of the text were left out to make it fit.

        Raises
        ------
        ValueError
            When prompt and new tokens exceed the model's positions and `truncate` is off, or question and new tokens do.
        """
        ids = self.encode(text, ask)
        if self.positions is None or len(ids) + new_tokens <= self.positions:
            return ids, 0
        room, around = self.positions - new_tokens, len(self.encode(GAP, ask))
        if around > room:  # --truncate could not help
            raise ValueError(
                f"{new_tokens} tokens are to be generated and the question alone takes {around}, but the model has "
                f"{self.positions} positions; give a smaller --max-new-tokens, a shorter question or a model with more positions"
            )
        if not truncate:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and {new_tokens} are to be generated, but the model has "
                f"{self.positions} positions; add --truncate to keep the text's beginning and end, or give a shorter "
                "file, a smaller --max-new-tokens or a model with more positions"
            )
        keep = len(text)
        while len(ids) > room:
            # text per token varies, so aim a little low and look again
            share = (room - around) / max(len(ids) - around, 1)
            keep = max(min(int(keep * share * 0.995), keep - 1), 0)
            head = (keep + 1) // 2
            ids = self.encode(text[:head] + GAP + text[len(text) - (keep - head) :], ask)
        return ids, len(text) - keep
