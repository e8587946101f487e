"""A tokenizer of one token a word, or character beside words, and a model small enough for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

CHAT = (
    "{% for m in messages %}{{ '<user> ' + m['content'] | trim + ' <end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' <model> ' }}{% endif %}"
)


def tokenizer(chat: bool = False, folder: Path | None = None) -> Any:
    """Return a tokenizer that keeps every character: words w0 to w59 and single bytes."""
    words = ["<user>", "<end>", "<model>", *(f"w{i}" for i in range(60))]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: i for i, word in enumerate([*words, *letters])}
    made = Tokenizer(WordLevel(vocabulary, unk_token=letters[0]))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            pre_tokenizers.Split(Regex(r"<\w+>|w\d+|."), "isolated"),
        ]
    )
    made.decoder = decoders.ByteLevel()
    out = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    if chat:
        out.chat_template = CHAT
    if folder is not None:
        out.save_pretrained(folder)
    return out
