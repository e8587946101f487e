"""``prehoc tune cis`` on a tiny model."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

from prehoc import cli
from prehoc.trace import trace


@pytest.fixture(scope="module")
def folder(tiny_llama: Callable[..., Path]) -> Path:
    return tiny_llama({"a.txt": 180, "b.txt": 180}, num_attention_heads=2, num_key_value_heads=1)


def call(monkeypatch: pytest.MonkeyPatch, folder: Path, out: Path, *more: str) -> int:
    texts = ("--text-file", str(folder / "a.txt"), "--text-file", str(folder / "b.txt"))
    sizes = ("--prompt-tokens", "120", "--steps", "6", "--budgets", "64,80")
    monkeypatch.setattr(
        "sys.argv", ["prehoc", "tune", "cis", "--model", str(folder), *texts, *sizes, "--out", str(out), *more]
    )
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_publishes_every_setting_beside_dense(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep.json"
    assert call(monkeypatch, folder, out, "--plot", str(tmp_path / "sweep.png")) == 0
    shown = capsys.readouterr().out
    assert "budget 64" in shown and "| dense | - |" in shown and "| s=16, tau=0.8 |" in shown
    document = json.loads(out.read_text())
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
    assert {file.name for file in tmp_path.iterdir()} == {"sweep.json", "sweep.png"}
    rows = {(row["budget"], row["label"]): row for row in document["rows"]}
    assert len(rows) == len(document["rows"]) > 40
    dense, oracle, base = rows[None, "dense"], rows[64, "oracle"], rows[64, "defaults"]
    assert dense["retained"]["mean"] == 1 and dense["bytes_share"] == 1 and dense["retrieval_ratio"]["mean"] is None
    assert oracle["beta"]["mean"] == pytest.approx(0, abs=1e-6) and oracle["retrieval_ratio"]["mean"] == 1
    assert base["n"] == 2 * 2 * 1 and len(base["by_window"]) == document["windows"] == 2
    assert document["places"] == [["a.txt", 0], ["b.txt", 0]]
    assert base["beta"]["low"] <= base["beta"]["mean"] <= base["beta"]["high"]
    assert rows[64, "matched"]["keys"]["mean"] <= 64 < base["keys"]["mean"]
    assert str(folder) not in json.dumps(document["texts"]) and document["texts"][0]["sha256"]


def test_only_what_varies_the_asked_keys(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "few.json"
    assert call(monkeypatch, folder, out, "--vary", "radius") == 0
    labels = [row["label"] for row in json.loads(out.read_text())["rows"] if row["budget"] in (64, None)]
    assert labels == ["dense", "oracle", "streaming", "defaults", "r=2"]
    capsys.readouterr()
    assert call(monkeypatch, folder, tmp_path / "none.json", "--vary", "radios") == 2
    assert "did you mean 'radius'" in capsys.readouterr().err
    assert call(monkeypatch, folder, out, "--vary", "gate", "--method", "cis:gate=query,local=16") == 0
    methods = {row["label"]: row["method"] for row in json.loads(out.read_text())["rows"] if row["budget"] == 64}
    assert methods["defaults"] == "cis:budget=64,local=16,gate=query"
    assert methods["gate=score, tau=0.8"] == "cis:budget=64,local=16,tau=0.8"
    assert call(monkeypatch, folder, tmp_path / "none.json", "--method", "cpe") == 2
    assert "method='cpe' is not CIS, whose keys are varied; give for example cis:gate=query" in capsys.readouterr().err


def test_an_interrupted_run_goes_on_where_it_was(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import prehoc.eval.cis_sweep as sweep

    whole, out, real = tmp_path / "whole.json", tmp_path / "sweep.json", sweep.trace
    assert call(monkeypatch, folder, whole) == 0
    calls = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError("the machine went away")
        return real(*args, **kwargs)

    monkeypatch.setattr(sweep, "trace", failing)
    assert call(monkeypatch, folder, out) == 2
    assert not out.exists() and (tmp_path / "sweep.part.jsonl").exists()
    assert call(monkeypatch, folder, out) == 0
    assert calls == 3, "the first window is not read again"
    assert json.loads(out.read_text())["rows"] == json.loads(whole.read_text())["rows"]


def stop_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Let the machine go away at one of the windows to come; returns a list that grows by each window read."""
    import prehoc.eval.cis_sweep as sweep

    read: list[int] = []
    real = sweep.trace

    def failing(*args: Any, **kwargs: Any) -> Any:
        read.append(len(read))
        if len(read) == number:
            raise OSError("the machine went away")
        return real(*args, **kwargs)

    monkeypatch.setattr(sweep, "trace", failing)
    return read


def test_an_interrupted_run_of_more_windows_is_another_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, short = tmp_path / "sweep.json", ("--prompt-tokens", "70", "--budgets", "64")
    stop_at(monkeypatch, 4)
    assert call(monkeypatch, folder, out, "--windows", "4", *short) == 2
    assert call(monkeypatch, folder, out, "--windows", "2", *short) == 0
    document = json.loads(out.read_text())
    assert document["windows"] == 2 and document["rows"][0]["n"] == 2 * 2 * 1


def test_files_of_one_name_are_two_windows(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text((folder / "b.txt").read_text())
    out = tmp_path / "sweep.json"
    options = ("--text-file", str(tmp_path / "a.txt"), "--prompt-tokens", "70", "--budgets", "64")
    assert call(monkeypatch, folder, out, *options) == 0
    (dense, *_) = json.loads(out.read_text())["rows"]
    assert dense["n"] == 3 * 2 * 1 and len(dense["by_window"]) == 3


def test_a_change_of_defaults_is_another_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prehoc.eval import cis_sweep

    out, short = tmp_path / "sweep.json", ("--prompt-tokens", "70", "--budgets", "64")
    read = stop_at(monkeypatch, 2)
    assert call(monkeypatch, folder, out, *short) == 2
    given = cis_sweep.parse_method
    monkeypatch.setattr(cis_sweep, "parse_method", lambda *text: dataclasses.replace(given(*text), tau=0.75))  # type: ignore[type-var]
    assert call(monkeypatch, folder, out, *short) == 0
    assert len(read) == 4, "both windows are read again"


def test_a_model_without_full_attention_is_refused_before_it_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    config = MistralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        sliding_window=32,
    )
    mistral = tmp_path / "mistral"
    shutil.copytree(folder, mistral)
    MistralForCausalLM(config).save_pretrained(mistral)
    monkeypatch.setattr(MistralForCausalLM, "forward", None)
    assert call(monkeypatch, mistral, tmp_path / "sweep.json") == 2
    assert "none of the model's 2 layers has full attention to select in" in capsys.readouterr().err
    with pytest.raises(ValueError, match="none of the model's 2 layers has full attention"):
        trace(MistralForCausalLM(config).eval(), [1] * 60, 50, 4, "cis:critical=8")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--budgets", "64,x"), "budgets='64,x' is not a list of numbers"),
        (("--budgets", "30"), "budget=30 is too small"),
        (("--layer-stride", "0"), "layer_stride=0 must be at least 1"),
        (("--prompt-tokens", "190"), "tokens, too short for 1 windows of 196"),
        (("--plot", "no/folder/a.png"), "there is no folder 'no/folder'"),
        (("--plot", "a.xyz"), "matplotlib cannot write 'a.xyz'"),
        (("--prompt-tokens", "0"), "'--prompt-tokens': Input should be greater than or equal to 1"),
    ],
)
def test_bad_input_is_named(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "forward", None)  # all of this is found before the model runs
    assert call(monkeypatch, folder, tmp_path / "sweep.json", *more) == 2
    assert message in capsys.readouterr().err
