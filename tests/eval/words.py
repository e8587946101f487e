"""A tokenizer of one token a word, or character beside words, and a model small enough for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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


def save_model(folder: Path, *, chat: bool = False, positions: int = 4096) -> Path:
    """Write a random model of two layers, with that tokenizer, and return its folder."""
    words = tokenizer(chat, folder)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        eos_token_id=words.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(shape)
    for weights in model.parameters():
        weights.data *= 2  # a random model of usual scale answers with one token for ever
    model.save_pretrained(folder)
    return folder
