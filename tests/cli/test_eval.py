"""``prehoc eval`` on a tiny model, and once on a real one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from eval.words import save_model
from prehoc import cli
from prehoc.cli.eval import parse_methods
from prehoc.eval.engine import Engine
from prehoc.methods import describe, parse_method

Run = Callable[..., int]
PSAW = "psaw:local=8,phi=0.5,start_layer=0"
METHODS = f"oracle:critical=24 cis:critical=24 {PSAW}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"), chat=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "kv_retrieval").mkdir()
    (folder / "wikitext2").mkdir()
    rows = []
    for number in range(6):
        pairs = [[f"w{(7 * i + number) % 60}", f"w{(11 * i + number) % 60}"] for i in range(9 + number)]
        rows.append({"ordered_kv_records": pairs, "key": pairs[number][0], "value": pairs[number][1]})
    (folder / "kv_retrieval/kv_75.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "wikitext2/wiki.test.raw").write_text("".join(f"w{i * i % 60}" for i in range(400)))
    return folder


@pytest.fixture
def run(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("PREHOC_BACKEND", "reference")

    def call(*more: str, out: str = "run") -> int:
        given = {"--model": str(model), "--data": str(data), "--out": str(tmp_path / out)}
        given |= {"--tasks": "kv_retrieval", "--methods": METHODS, "--audit": "0.3"}
        options = list(more)
        for name, value in given.items():
            if name not in options:
                options += [name, value]
        monkeypatch.setattr("sys.argv", ["prehoc", "eval", *options])
        try:
            cli.main()
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    return call


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


TIMES = ("seconds", "prefill_seconds")


def untimed(path: Path) -> list[str]:
    found = [{key: value for key, value in line.items() if key not in TIMES} for line in lines(path)]
    return sorted(json.dumps(line, sort_keys=True) for line in found)


def test_a_run_leaves_lines_tables_and_where_they_came_from(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--tasks", "kv_retrieval,wikitext", "--length", "128", "--limit", "3", "--decode-question") == 0
    shown = capsys.readouterr()
    assert "kv_retrieval: n = 3, question decoded" in shown.out and "wikitext: n = 3, no question" in shown.out
    assert "not informative" in shown.out
    found = lines(tmp_path / "run/kv_retrieval.jsonl")
    assert len(found) == 3 * 4
    for line in found:
        assert line["decoded"] == line["fed_tokens"] + line["new_tokens"] - (line["finish"] != "eos")
        assert line["fed_tokens"] > 0 and line["traffic"]["steps"] == line["decoded"]
    document = json.loads((tmp_path / "run/summary.json").read_text())
    kv, wiki = document["tables"]
    rows = {row["method"]: row for row in kv["rows"]}
    assert list(rows) == ["dense", "oracle:critical=24", "cis:critical=24", describe(parse_method(PSAW))]
    assert rows["oracle:critical=24"]["retrieval_ratio"] == 1 and 0 < rows["cis:critical=24"]["retrieval_ratio"] <= 1
    assert rows["oracle:critical=24"]["keys"] == 64 < rows["oracle:critical=24"]["keys_visible"]
    assert (
        rows["cis:critical=24"]["beta"]["mean"] is not None and 0 < rows["cis:critical=24"]["retained_mass"]["mean"] < 1
    )
    assert kv["rows"][3]["prefill_share"] < rows["dense"]["prefill_share"] == 1
    decode = {row["method"]: row["scores"]["decode"] for row in wiki["rows"]}
    assert 1.5 < decode["dense"]["mean"] < 500 and decode["dense"]["difference"]["mean"] == 0
    assert wiki["rows"][1]["scores"]["prefill"]["difference"]["mean"] == 0, "oracle shares dense's prefill"
    assert wiki["rows"][3]["scores"]["prefill"]["difference"]["mean"] != 0
    about = json.loads((tmp_path / "run/run.json").read_text())
    assert about["commands"][0].startswith("prehoc eval") and about["identity"]["versions"]["torch"]
    assert "<user>" in about["chat_template"] and about["stop_ids"] == [1] and about["identity"]["decode_question"]
    assert about["tasks"]["kv_retrieval"]["stop"] == ["\n"] and about["methods"]["dense"] == {"name": "dense"}
    assert str(tmp_path) not in json.dumps(about["identity"])


def test_an_interrupted_run_goes_on_and_ends_like_another(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(out="whole") == 0
    decode, calls, seeds = Engine.decode, [], set()

    def failing(self: Engine, method: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(describe(method))
        seeds.add(kwargs["seed"])
        if len(calls) == 7:
            raise OSError("the machine went away")
        return decode(self, method, *args, **kwargs)

    monkeypatch.setattr(Engine, "decode", failing)
    assert run() == 2
    file = tmp_path / "run/kv_retrieval.jsonl"
    assert len(lines(file)) == 6 and not (tmp_path / "run/summary.json").exists()
    with file.open("a") as half:
        half.write('{"sample": "row-1", "met')
    assert run() == 0
    # 24 cells: 6 before the interruption, 1 lost, and dense once more, as the reference of the sample it happened in
    assert len(calls) == 24 + 1 + 1
    assert untimed(file) == untimed(tmp_path / "whole/kv_retrieval.jsonl")
    tables = [json.loads((tmp_path / name / "summary.json").read_text())["tables"][0] for name in ("run", "whole")]
    scores = [[row["scores"] for row in table["rows"]] for table in tables]
    assert scores[0] == scores[1]
    assert len(seeds) == 6, "methods are audited at the same steps, samples at others"
    del calls[:]
    assert run() == 0 and calls == [], "a finished run computes nothing"


def test_whoever_stops_a_run_is_told_that_it_goes_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decode, calls = Engine.decode, []

    def stopped(self: Engine, method: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(describe(method))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return decode(self, method, *args, **kwargs)

    monkeypatch.setattr(Engine, "decode", stopped)
    assert run("--limit", "2") == 130
    said = f"interrupted: what is finished is kept in {tmp_path / 'run'}; the same command goes on where it was\n"
    assert capsys.readouterr().err.endswith(said)
    assert len(lines(tmp_path / "run/kv_retrieval.jsonl")) == 3
    assert run("--limit", "2") == 0
    assert len(lines(tmp_path / "run/kv_retrieval.jsonl")) == 2 * 4


def test_more_samples_and_methods_are_added_to_a_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--limit", "2", "--methods", "cis:critical=24") == 0
    assert run("--limit", "4", "--methods", "cis:critical=24 oracle:critical=24") == 0
    found = lines(tmp_path / "run/kv_retrieval.jsonl")
    assert len(found) == len({(line["sample"], line["method"]) for line in found}) == 4 * 3
    assert run("--limit", "4", "--methods", "cis:critical=24 oracle:critical=24", out="whole") == 0
    assert untimed(tmp_path / "run/kv_retrieval.jsonl") == untimed(tmp_path / "whole/kv_retrieval.jsonl")


def test_batches_answer_like_single_samples(run: Run, tmp_path: Path) -> None:
    assert run("--decode-question") == 0
    assert run("--decode-question", "--batch", "4", out="batched") == 0
    one, many = (
        {(line["sample"], line["method"]): line for line in lines(tmp_path / name / "kv_retrieval.jsonl")}
        for name in ("run", "batched")
    )
    assert one.keys() == many.keys()
    for key, line in one.items():
        assert many[key]["output"] == line["output"] and many[key]["decoded"] == line["decoded"]
        assert line["method"] == "dense" or many[key]["kl"] == pytest.approx(line["kl"], rel=1e-3, abs=1e-5)
    for method in {key[1] for key in one}:
        sums = [
            [
                sum(line["traffic"][name] for key, line in some.items() if key[1] == method)
                for name in ("keys_read", "retrievals")
            ]
            for some in (one, many)
        ]
        assert sums[0] == pytest.approx(sums[1])


def test_malformed_rows_are_named_and_left_out_or_stop_the_run(
    run: Run, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(data, broken)
    with (broken / "kv_retrieval/kv_75.jsonl").open("a") as file:
        file.write('{"key": "a"}\n')
    assert run("--data", str(broken), "--limit", "1") == 0
    assert "kv_retrieval/kv_75.jsonl, line 7: it has no field 'ordered_kv_records'" in capsys.readouterr().err
    about = json.loads((tmp_path / "run/run.json").read_text())
    assert len(about["tasks"]["kv_retrieval"]["malformed"]) == 1
    monkeypatch.setattr(LlamaForCausalLM, "forward", None)
    assert run("--data", str(broken), "--strict", out="strict") == 2
    assert "malformed row in kv_retrieval/kv_75.jsonl, line 7" in capsys.readouterr().err


def test_an_implausible_dense_row_is_not_printed(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], data: Path
) -> None:
    folder = tmp_path / "coqa-data"
    (folder / "coqa").mkdir(parents=True)
    row = {"id": "x", "story": "w1w2 " * 30, "questions": ["who?"], "answers": ["nobody at all"]}
    (folder / "coqa/dev.jsonl").write_text(json.dumps(row) + "\n")
    assert run("--tasks", "coqa", "--data", str(folder)) == 2
    shown = capsys.readouterr()
    assert "refused to print 1 of 1 tables: coqa: dense has f1 0.00, outside the plausible range" in shown.err
    assert "dense" not in shown.out
    table = json.loads((tmp_path / "run/summary.json").read_text())["tables"][0]
    assert table["refused"] and table["rows"][0]["n"] == 1


def test_one_json_document(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--limit", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tables"][0]["task"] == "kv_retrieval"


def test_a_group_leaves_out_what_has_no_data(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--tasks", "ruler", "--limit", "1", "--length", "1500", "--methods", "dense") == 0
    shown = capsys.readouterr()
    assert "ruler_vt: n = 1" in shown.out and "ruler_qa_1" not in shown.out
    assert "ruler_qa_1 is left out: there is no ruler/squad*.jsonl" in shown.err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--tasks", "coca"), "unknown task 'coca'; did you mean 'coqa'"),
        (("--tasks", "coqa"), "there is no coqa/*.json or coqa-dev*.json below the data folder"),
        (("--methods", "sis"), "unknown method 'sis'; did you mean 'cis'"),
        (("--methods", "cis:budget=20"), "budget=20 is too small"),
        (("--data", "no/folder"), "the data folder 'no/folder' does not exist"),
        (("--audit", "2"), "audit=2.0 must lie in [0.0, 1.0]"),
        (("--backend", "gpu"), "unknown backend 'gpu'"),
        (("--max-length", "5000"), "--max-length 5000 exceeds the model's 4096 positions"),
        (("--length", "5000"), "--length 5000 exceeds the 4096 tokens that are allowed"),
        (("--max-length", "120"), "without its middle it cannot be answered"),
        (("--dtype", "int3"), "unknown dtype 'int3'"),
    ],
)
def test_bad_input_is_found_before_the_model_runs(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    more: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", None)
    assert run(*more) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_another_run_in_the_folder_is_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--limit", "1", "--methods", "dense") == 0
    assert run("--limit", "1", "--methods", "dense", "--seed", "3") == 2
    assert "holds another run (seed 0 there, 3 now)" in capsys.readouterr().err


def test_packed_layers_answer_alike_and_are_another_run(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--limit", "2", "--methods", "cis:critical=24")
    assert run(*asked) == 0 and run(*asked, "--pack", out="packed") == 0
    plain, packed = (lines(tmp_path / name / "kv_retrieval.jsonl") for name in ("run", "packed"))
    assert [line["output"] for line in packed] == [line["output"] for line in plain]
    assert json.loads((tmp_path / "packed" / "summary.json").read_text())["packed"]
    assert run(*asked, "--pack") == 2
    assert "holds another run (packed None there, True now)" in capsys.readouterr().err
    assert run(*asked, "--pack", "--dtype", "float16", out="half") == 2
    assert "has no linear layer to pack" in capsys.readouterr().err and not (tmp_path / "half").exists()


def test_methods_are_separated_by_spaces_or_plain_names_by_commas() -> None:
    def names(text: str) -> list[str]:
        return [describe(method) for method in parse_methods(text)]

    assert names("dense,oracle,cis") == ["dense", "oracle", "cis"]
    assert names("cis:budget=128,tau=0.9 oracle") == ["dense", "cis:budget=128,tau=0.9", "oracle"]
    assert names("cis cis dense") == ["dense", "cis"]


def test_a_real_model_answers_real_samples(
    smollm2_path: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--model", str(smollm2_path), "--data", str(data_dir), "--out", str(tmp_path / "run"), "--tasks", "coqa"]
    more = ["--methods", "cis:budget=64", "--limit", "2", "--decode-question"]
    monkeypatch.setattr("sys.argv", ["prehoc", "eval", *options, *more])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    dense, cis = json.loads((tmp_path / "run/summary.json").read_text())["tables"][0]["rows"]
    assert dense["scores"]["f1"]["mean"] > 1 and cis["decoded"] > 10
    assert cis["keys"] < dense["keys"] and 0 < cis["retrieval_ratio"] < 1
