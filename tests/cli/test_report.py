"""``prehoc report`` over what the commands themselves write on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench_shapes import TINY
from eval.words import save_model
from prehoc import cli
from prehoc.bench import inputs, memory, rows, stream

METHODS = "oracle:critical=24 oracle:critical=40 cis:critical=24 cis:critical=40"


def call(*words: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["prehoc", *words])
        try:
            cli.main()
        except SystemExit as stop:
            return int(stop.code or 0)
    return 0


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with attention.json, decode.json, prefill.json and the evaluation in run."""
    folder = tmp_path_factory.mktemp("results")
    (folder / "coqa").mkdir()
    turns = [{"input_text": f"w{i} w{i + 1}", "turn_id": i + 1} for i in range(2)]
    story = " ".join(f"w{i * i % 60}" for i in range(120))
    row = {"id": "a", "story": story, "questions": turns, "answers": [{**turn, "span_text": "w1"} for turn in turns]}
    (folder / "coqa/dev.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "text.txt").write_text("".join(f"w{i * i % 60}" for i in range(900)))
    model = str(save_model(tmp_path_factory.mktemp("model")))
    fast = ("--threads", "1", "--backend", "reference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "stream_bandwidth", lambda: 1e15)
        patch.setattr(memory, "last_cache_bytes", lambda device: 1)
        patch.setattr(rows, "decode_flex", _no_compiler)
        patch.setitem(inputs.SHAPES, "llama2-7b", TINY)
        words = [
            "--batch",
            "8",
            "--length",
            "2048",
            "--layers",
            "1",
            "--steps",
            "8",
            "--rounds",
            "1",
            "--dtype",
            "float32",
        ]
        words += ["--methods", "cis-8:budget=56,local=16", *fast]
        assert call("bench", "attention", *words, "--out", str(folder / "attention.json")) == 0
    text = ("--model", model, "--text-file", str(folder / "text.txt"), *fast)
    prefill = ("--length", "64", "--rounds", "1", "--methods", "psaw:local=8,phi=0.5,start_layer=0")
    assert call("bench", "prefill", *text, *prefill, "--out", str(folder / "prefill.json")) == 0
    tasks = ("--data", str(folder), "--tasks", "coqa", "--methods", METHODS, "--audit", "0.5", "--decode-question")
    call("eval", "--model", model, *tasks, *fast, "--out", str(folder / "run"))
    return folder


def _no_compiler(*args: Any) -> None:
    raise RuntimeError("no compiler here")


def test_draws_what_the_commands_wrote(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(results / name) for name in ("attention.json", "prefill.json", "run")]
    out, figures = tmp_path / "page.html", tmp_path / "figures"
    assert call("report", *files, "--out", str(out), "--figures", str(figures), "--title", "mine & ours", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert [run["kind"] for run in answer["runs"]] == ["attention", "prefill", "eval"]
    text = out.read_text()
    assert "<h1>mine &amp; ours</h1>" in text and {path.suffix for path in figures.iterdir()} == {".svg", ".png"}
    document = json.loads((results / "attention.json").read_text())
    for row in document["cells"][0]["rows"]:
        if "ms" in row:
            assert f">{row['ms']:.3f}</td>" in text
    assert "did not run: RuntimeError: no compiler here" in text
    prefill = json.loads((results / "prefill.json").read_text())
    assert all(f"{row['seconds']:.3f}" in text for row in prefill["rows"])


def test_an_evaluation_stands_beside_the_paper(results: Path, tmp_path: Path) -> None:
    summary = json.loads((results / "run/summary.json").read_text())
    table = summary["tables"][0]
    table["refused"] = None  # a random model is implausible, and refused: its numbers will do here
    (tmp_path / "run").mkdir()
    (tmp_path / "run/summary.json").write_text(json.dumps(summary))
    assert call("report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")) == 0
    text = (tmp_path / "page.html").read_text()
    assert "Table II: coqa" in text and "<td>60.85</td>" in text and "<td>59.97</td>" in text
    for row in table["rows"]:
        assert row["method"].split(",")[0] in text
        assert f">{row['keys']:.0f}</td>" in text
        assert row["retained_mass"] is None or f"{row['retained_mass']['mean']:.4f}" in text
    assert any(row["retained_mass"] for row in table["rows"])
    missing = text[text.index('id="missing"') :]
    assert "Figure 6:" not in missing and "Figure 12:" not in missing and "Pareto:" not in missing


def test_a_refused_table_is_not_shown(results: Path, tmp_path: Path) -> None:
    summary = json.loads((results / "run/summary.json").read_text())
    summary["tables"][0]["refused"] = "dense is implausible"
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert call("report", str(tmp_path / "summary.json"), "--out", str(tmp_path / "page.html")) == 0
    text = (tmp_path / "page.html").read_text()
    assert "coqa: refused" in text and "dense is implausible" in text and "59.97" not in text


def test_errors(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, out = str(results / "prefill.json"), tmp_path / "page.html"
    (tmp_path / "other.json").write_text('{"a": 1}')
    for words, why in (
        ((good, "--out", str(tmp_path)), "is a folder"),
        (
            (good, str(tmp_path / "other.json"), "--out", str(out)),
            "other.json' is nothing that prehoc wrote; accepted are",
        ),
        (
            (good, "--out", str(out), "--figures", str(tmp_path / "other.json")),
            "is a file; give a folder for --figures",
        ),
    ):
        assert call("report", *words) == 2
        assert why in capsys.readouterr().err
    assert not out.exists()
