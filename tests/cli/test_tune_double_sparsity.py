"""``prehoc tune double-sparsity`` on a tiny model: the order it writes, and that the method takes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from prehoc import cli
from prehoc.trace import trace


def call(monkeypatch: pytest.MonkeyPatch, folder: Path, out: Path, *more: str) -> int:
    text = ("--text-file", str(folder / "a.txt"), "--prompt-tokens", "40", "--steps", "6")
    monkeypatch.setattr(
        "sys.argv", ["prehoc", "tune", "double-sparsity", "--model", str(folder), *text, "--out", str(out), *more]
    )
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_writes_an_order_that_the_method_takes(
    tiny_llama: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, out = tiny_llama({"a.txt": 60}), tmp_path / "channels.json"
    assert call(monkeypatch, folder, out, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(out.read_text())
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    ids = AutoTokenizer.from_pretrained(folder)((folder / "a.txt").read_text(), return_tensors="pt")["input_ids"]
    found = trace(model, ids[0], 40, 6, "dense", observe=True, record=("qk",))
    assert found.q is not None and found.k is not None
    for layer in range(2):
        for head in range(2):
            queries, keys = found.q[:, layer, 2 * head : 2 * head + 2], found.k[layer, head]
            products = np.abs(queries[:, :, None] * keys[None, None]).mean((0, 1, 2))  # over every query and key
            order = document["channels"][layer][head]
            assert sorted(order) == list(range(8))
            assert (np.diff(products[order]) <= 1e-6).all()
    method = f"double_sparsity:critical=8,sink=2,local=4,channels=4,calibration={out}"
    again = trace(model, torch.as_tensor(ids[0]), 40, 6, method)
    assert (again.keys == 14).all()


def test_errors_come_before_any_work(
    tiny_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_llama({"a.txt": 60})
    assert call(monkeypatch, folder, tmp_path / "none" / "x.json") == 2
    assert "there is no folder" in capsys.readouterr().err
    assert call(monkeypatch, folder, tmp_path / "x.json", "--prompt-tokens", "400") == 2
    assert "exceed the model's 256 positions" in capsys.readouterr().err
