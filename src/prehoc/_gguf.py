"""Turning a GGUF file into a transformers model and a tokenizer.

transformers reads GGUF weights and shapes faithfully, but rebuilds the *tokenizer* differently in every release, and
wrongly for each file of our catalogue (measured, not assumed):

* 5.16 names ``<|im_start|>`` as SmolLM2's end token (so an answer never ends) and loses Gemma's ``<bos>`` and the order
  of its merges (``return`` becomes ``re`` + ``turn``);
* 5.16 to 5.24 do not know SmolLM2's pre-tokenizer, which cuts numerals off before the merges (it shows on `` ½``), nor
  Qwen2's NFC normalisation.

So the tokenizer is built here from the file's own metadata, the same on every version.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONTROL, USER_DEFINED = 3, 4  # token types of the GGUF format
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_metadata(path: Path) -> dict[str, Any]:
    """Read the key-value part of a GGUF file and check that every tensor lies inside the file.

    Raises
    ------
    ValueError
        If the file is not GGUF, or is truncated or damaged.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file (it does not start with 'GGUF'); give a .gguf model file")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)  # maps every tensor: a file that is cut short fails here, before any long work
        return {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        size = path.stat().st_size
        raise ValueError(f"{path} ({size} bytes) is truncated or damaged ({error}); fetch the file again") from error


def build_tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerBase | None:
    """Build the tokenizer a GGUF file describes; None for a kind that is not known here."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    architecture = metadata["general.architecture"]
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    if kind == "gpt2" and pre in ("smollm", "qwen2"):
        core = _byte_level(tokens, metadata["tokenizer.ggml.merges"], pre)
    elif kind == "llama" and architecture == "gemma3":
        core = _gemma(tokens)
        tokens = _respelled(tokens)
    else:
        return None

    types = metadata.get("tokenizer.ggml.token_type", [])
    marked = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)]
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token, k in marked if k == CONTROL])
    core.add_tokens([AddedToken(token, normalized=False, special=False) for token, k in marked if k == USER_DEFINED])

    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            special[f"{name}_token"] = tokens[index]
    if metadata.get("tokenizer.ggml.add_bos_token"):
        _prepend(core, special["bos_token"])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=metadata.get("tokenizer.chat_template"),
        model_max_length=metadata[f"{architecture}.context_length"],
        clean_up_tokenization_spaces=False,
        **special,
    )


def _byte_level(tokens: list[str], merges: list[str], pre: str) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    if pre == "smollm":
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        core.normalizer = normalizers.NFC()
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    core.decoder = decoders.ByteLevel()
    return core


def _respelled(tokens: list[str]) -> list[str]:
    # Runs of spaces are stored as real spaces, but the normaliser turns every space of a text into U+2581.
    return ["\u2581" * len(token) if " " in token and not token.strip(" ") else token for token in tokens]


def _gemma(tokens: list[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = {token: i for i, token in enumerate(_respelled(tokens))}
    # The file lists no merges. Every way to cut a token into two known tokens is one; Gemma learned them in the order
    # of the merged tokens (its scores say otherwise), so that order is their priority; among the cuts of one token the
    # longest left part goes first, as in the tokenizer Gemma is published with.
    pairs = []
    for token in vocab:
        cuts = ((token[:i], token[i:]) for i in range(len(token) - 1, 0, -1))
        pairs += [cut for cut in cuts if cut[0] in vocab and cut[1] in vocab]
    core = Tokenizer(models.BPE(vocab=vocab, merges=pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Replace(" ", "\u2581")
    core.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return core


def _prepend(core: Tokenizer, token: str) -> None:
    from tokenizers import processors

    core.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token}:1 $B:1", special_tokens=[(token, core.token_to_id(token))]
    )


def load_gguf(
    path: Path, dtype: torch.dtype, eos_tokens: tuple[str, ...] = ()
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a GGUF file as a dequantised transformers model with its tokenizer.

    Parameters
    ----------
    path : Path
        The file.
    dtype : torch.dtype
        Type of the dequantised weights.
    eos_tokens : tuple of str
        Tokens that end a generation; empty for the file's own end token.

    Raises
    ------
    ValueError
        If the file is damaged or its architecture is not supported by transformers.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    metadata = read_metadata(path)
    tokenizer = build_tokenizer(metadata)
    if tokenizer is None:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    # The weights are plain tensors now; with the marks of quantisation left on, transformers refuses to save them.
    model.hf_quantizer = None  # type: ignore[assignment]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # GGUF stores this as float32: 1e-05 comes back as 9.999999747378752e-06.
    model.config.rms_norm_eps = float(str(np.float32(model.config.rms_norm_eps)))
    ends = [tokenizer.convert_tokens_to_ids(token) for token in eos_tokens] or [tokenizer.eos_token_id]
    eos = ends[0] if len(ends) == 1 else ends
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
        config.eos_token_id = eos
    return model.eval(), tokenizer


def convert(path: Path, folder: Path, eos_tokens: tuple[str, ...]) -> None:
    """Write a GGUF file as a safetensors folder (float32: a dequantised value is not exact in 16 bit)."""
    import torch

    model, tokenizer = load_gguf(path, torch.float32, eos_tokens)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
