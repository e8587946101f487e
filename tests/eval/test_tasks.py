"""Tasks: prompts as their sources record them, sound and malformed rows, draws, and generated lengths."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.words import tokenizer
from prehoc.eval.prompts import Encoder
from prehoc.eval.tasks import GROUPS, TASKS, Context, Loaded, MissingData, Sample, Source, choose


def write(folder: Path, name: str, rows: list[Any]) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return folder


def load(folder: Path | None, name: str, limit: int | None = None, length: int | None = None, seed: int = 0) -> Loaded:
    return TASKS[name].load(Context(Source(folder), Encoder(tokenizer(), None), limit, length, seed))


def full(sample: Sample) -> str:
    return sample.document + sample.question + sample.prefix


COQA = {"id": "s1", "story": "A cat.", "questions": ["who?", "where?"], "answers": ["a cat", "home"]}


def test_coqa_asks_every_turn_with_the_turns_before_it(tmp_path: Path) -> None:
    found = load(write(tmp_path, "coqa/dev.jsonl", [COQA]), "coqa").samples
    assert full(found[0]) == "A cat.\n\nQ: who?\n\nA:"
    assert full(found[1]) == "A cat.\n\nQ: who?\n\nA: a cat\n\nQ: where?\n\nA:"
    assert [sample.document for sample in found] == ["A cat.\n\n"] * 2
    assert TASKS["coqa"].score(found[0], " The cat!\nQ: more") == {"f1": 1.0, "em": 1.0}


def test_coqa_reads_the_release(tmp_path: Path) -> None:
    def said(*texts: str) -> list[dict[str, str]]:
        return [{"input_text": one} for one in texts]

    more = {"0": said("cat", "house"), "1": said("dog", "home")}
    story = {"id": "x", "story": "S", "questions": said("who?", "where?"), "answers": said("a cat", "home")}
    (tmp_path / "coqa").mkdir()
    file = tmp_path / "coqa" / "coqa-dev-v1.0.json"
    file.write_text(json.dumps({"data": [{**story, "additional_answers": more}, {"id": "y"}]}))
    loaded = load(tmp_path, "coqa")
    assert [sample.answers for sample in loaded.samples] == [("a cat", "cat", "dog"), ("home", "house", "home")]
    assert str(loaded.faults[0]) == "coqa-dev-v1.0.json, story, line 2: it has no field 'questions'"
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"coqa-dev-v1.0.json, line 1: it is not CoQA's JSON"):
        load(tmp_path, "coqa")


GSM = {"question": "1+1?", "answer": "It is 2\n#### 2"}


def test_gsm8k_shows_five_examples(tmp_path: Path) -> None:
    write(tmp_path, "gsm8k/test.jsonl", [GSM])
    write(tmp_path, "gsm8k/train_first100.jsonl", [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(7)])
    (sample,) = load(tmp_path, "gsm8k").samples
    shots = "\n\n".join(f"Question: q{i}\nAnswer: #### {i}" for i in range(5))
    assert full(sample) == f"{shots}\n\nQuestion: 1+1?\nAnswer:"
    assert TASKS["gsm8k"].score(sample, "so 2.") == {"flexible": 1.0, "strict": 0.0}
    assert TASKS["gsm8k"].score(sample, "#### 2 or 3") == {"flexible": 0.0, "strict": 1.0}
    (chat,) = load(tmp_path, "gsm8k_chat").samples
    assert chat.question == "Question: 1+1?" and "####" in chat.document
    write(tmp_path, "gsm8k/train_first100.jsonl", [GSM] * 4)
    with pytest.raises(ValueError, match="has 4 rows, 5 examples are needed"):
        load(tmp_path, "gsm8k")


def test_key_values_are_one_json_object(tmp_path: Path) -> None:
    row = {"ordered_kv_records": [["a", "1"], ["b", "2"], ["c", "3"]], "key": "b", "value": "2"}
    (sample,) = load(write(tmp_path, "kv_retrieval/kv_75.jsonl", [row]), "kv_retrieval").samples
    _, _, data = sample.document.partition("JSON data:\n")
    assert json.loads(data) == {"a": "1", "b": "2", "c": "3"} and data.count("\n") == 2
    assert sample.question == '\n\nKey: "b"\nCorresponding value:' and sample.tags == {"depth": 0.5}
    assert TASKS["kv_retrieval"].score(sample, ' "2"') == {"found": 1.0}


def test_longbench_takes_the_official_template(tmp_path: Path) -> None:
    row = {"input": "who?", "context": "{input} is text", "answers": ["Ann", "Bo"], "row": 7, "all_classes": None}
    folder = write(tmp_path, "longbench_v1/hotpotqa.jsonl", [row])
    (folder / "longbench_v1/dataset2prompt.json").write_text('{"hotpotqa": "Read. {context} Q: {input} A:"}')
    (folder / "longbench_v1/dataset2maxlen.json").write_text('{"hotpotqa": 32}')
    (sample,) = load(folder, "longbench_hotpotqa").samples
    assert (sample.id, sample.document, sample.question) == ("7", "Read. {input} is text", " Q: who? A:")
    assert TASKS["longbench_hotpotqa"].score(sample, "Bo") == {"f1": 1.0}
    (folder / "longbench_v1/dataset2maxlen.json").write_text('{"hotpotqa": 33}')
    with pytest.raises(ValueError, match="gives 33 new tokens for hotpotqa, officially 32"):
        load(folder, "longbench_hotpotqa")
    (folder / "longbench_v1/dataset2prompt.json").write_text("{}")
    with pytest.raises(ValueError, match="dataset2prompt.json cannot be used for hotpotqa"):
        load(folder, "longbench_hotpotqa")


@pytest.mark.parametrize(
    ("name", "answers", "output", "expected"),
    [
        ("trec", ["City"], "\n\nCity\nFood", 1.0),  # the first line only
        ("triviaqa", ["Ann"], "Ann\nBo", 1.0),
        ("samsum", ["a b"], "\na b\nc d", 1.0),
        ("hotpotqa", ["Ann"], "Ann\nBo", 2 / 3),
        ("passage_retrieval_en", ["Paragraph 12"], "12 or 13", 0.5),
        ("passage_count", ["4"], "4", 1.0),
        ("lcc", ["x = 1"], "# note\nx = 1", 1.0),
        ("gov_report", ["a b"], "a b", 1.0),
    ],
)
def test_longbench_scores(name: str, answers: list[str], output: str, expected: float) -> None:
    sample = Sample("0", answers=tuple(answers), tags={"all_classes": ["City", "Food"]})
    (value,) = TASKS[f"longbench_{name}"].score(sample, output).values()
    assert value == pytest.approx(expected, abs=1e-6)


def test_longbench2_states_its_choices(tmp_path: Path) -> None:
    row = {"_id": "x", "question": " Why? ", "context": "text\n", "answer": "C"}
    row |= {f"choice_{letter}": f"{letter}{letter}" for letter in "ABCD"}
    folder = write(tmp_path, "longbench_v2/sample.jsonl", [row, {**row, "_id": "y", "answer": "E"}])
    loaded = load(folder, "longbench2")
    (sample,) = loaded.samples
    assert full(sample) == (
        "Please read the following text and answer the question below.\n\n<text>\ntext\n</text>\n\n"
        "What is the correct answer to this question: Why?\nChoices:\n(A) AA\n(B) BB\n(C) CC\n(D) DD\n\n"
        'Format your response as follows: "The correct answer is (insert answer here)".'
    )
    assert TASKS["longbench2"].score(sample, "The correct answer is (C)") == {"accuracy": 1.0}
    assert "line 2: its answer 'E' is none of A, B, C, D" in str(loaded.faults[0])
    both = "The correct answer is (A)? No. The correct answer is (C)"
    assert TASKS["longbench2"].score(sample, both) == {"accuracy": 0.0}
    assert TASKS["longbench2_cot"].score(sample, both) == {"accuracy": 1.0}
    assert "step by step" in load(folder, "longbench2_cot").samples[0].question


def test_wikitext_is_cut_into_windows_that_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / "wikitext2" / "wiki.test.raw"
    path.parent.mkdir()
    path.write_text("".join(f"w{i % 60}" for i in range(200)))
    found = load(tmp_path, "wikitext", length=64).samples
    ids = tokenizer()(path.read_text())["input_ids"]
    assert [sample.ids + sample.continuation for sample in found] == [tuple(ids[i : i + 64]) for i in (0, 64, 128)]
    assert {len(sample.continuation) for sample in found} == {8}
    with pytest.raises(ValueError, match="the text has 200 tokens, too short for a window of 500"):
        load(tmp_path, "wikitext", length=500)


@pytest.mark.parametrize(
    ("task", "file", "row", "message"),
    [
        ("coqa", "coqa/d.jsonl", "{not json", "it is not JSON"),
        ("coqa", "coqa/d.jsonl", "[1]", "it is not a JSON object"),
        ("coqa", "coqa/d.jsonl", {**COQA, "id": "s3", "answers": ["one"]}, "it has 2 questions and 1 answers"),
        ("coqa", "coqa/d.jsonl", {**COQA, "id": "s3", "answers": ["a cat", "The"]}, "empty once articles"),
        ("coqa", "coqa/d.jsonl", {"id": "x"}, "it has no field 'questions'"),
        ("coqa", "coqa/d.jsonl", {**COQA, "id": "s3", "story": 3}, "field 'story' is int, not text"),
        ("coqa", "coqa/d.jsonl", COQA, "its id 's1-1' was there before"),
        ("gsm8k_chat", "gsm8k/test.jsonl", {"question": "q", "answer": "two"}, "no number behind '####'"),
        ("kv_retrieval", "kv_retrieval/kv_75.jsonl", {"ordered_kv_records": [["a"]]}, "not enough values"),
        (
            "kv_retrieval",
            "kv_retrieval/kv_75.jsonl",
            {"ordered_kv_records": [["a", "1"]], "key": "b", "value": "1"},
            "the pair of key 'b' is not among its records",
        ),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(
    tmp_path: Path, task: str, file: str, row: Any, message: str
) -> None:
    good = {"coqa": COQA, "gsm8k_chat": GSM}.get(task, {"ordered_kv_records": [["a", "1"]], "key": "a", "value": "1"})
    another = {**good, "id": "s2"} if task == "coqa" else good
    loaded = load(write(tmp_path, file, [good, "", row, another]), task)
    (fault,) = loaded.faults
    assert str(fault).startswith(f"{file}, line 3: ") and message in str(fault)
    assert len(loaded.samples) == 2 * len(load(write(tmp_path, file, [good]), task).samples)


def test_bytes_that_are_not_utf8_are_a_malformed_row(tmp_path: Path) -> None:
    write(tmp_path, "coqa/d.jsonl", [COQA])
    with (tmp_path / "coqa/d.jsonl").open("ab") as file:
        file.write(b'{"id": "\xff"}\n')
    (fault,) = load(tmp_path, "coqa").faults
    assert fault.line == 2 and "utf-8" in fault.reason


def test_a_larger_limit_draws_the_same_rows_and_more(tmp_path: Path) -> None:
    rows = [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(30)]
    write(tmp_path, "gsm8k/test.jsonl", rows)
    drawn = [{sample.id for sample in load(tmp_path, "gsm8k_chat", limit=n).samples} for n in (4, 9, 30)]
    assert [len(some) for some in drawn] == [4, 9, 30] and drawn[0] < drawn[1] < drawn[2]
    assert drawn[0] != {sample.id for sample in load(tmp_path, "gsm8k_chat", limit=4, seed=1).samples}


@pytest.fixture(scope="module")
def ruler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for kind in ("noun", "adjective", "verb"):
        write(folder, f"ruler/words/{kind}list.txt", [f"{kind[0]}{a}{b}" for a in "abcdefghijklm" for b in "nopqrstu"])
    paragraphs = [
        {
            "context": f"Place {i} is old. It has {i} towers.",
            "qas": [{"question": f"How old is {i}?", "answers": ["old"]}],
        }
        for i in range(60)
    ]
    write(folder, "ruler/squad_dev.jsonl", paragraphs)
    hotpot = {
        "question": "Who?",
        "answer": "Ann",
        "supporting_facts": [["T0", 0], ["T1", 0]],
        "context": [[f"T{i}", [f"Sentence {i}. ", "More."]] for i in range(4)],
    }
    rest = {**hotpot, "context": [[f"U{i}", ["Else."]] for i in range(90)], "supporting_facts": [["U0", 0]]}
    return write(folder, "ruler/hotpotqa_dev.jsonl", [hotpot, rest])


@pytest.mark.parametrize("name", [*GROUPS["ruler"], "niah", "passkey"])
@pytest.mark.parametrize("length", [1500, 2600])
def test_generated_prompts_fill_their_length(ruler: Path, name: str, length: int) -> None:
    if name == "ruler_cwe":
        length += 2500  # its solved example alone is long
    context = Context(Source(ruler), Encoder(tokenizer(), None), 3, length, 0)
    task = TASKS[name]
    samples = task.load(context).samples
    assert len({full(sample) for sample in samples}) == 3
    for sample in samples:
        tokens = len(context.encoder.encode(sample, chat=task.chat, new_tokens=0).ids) + task.new_tokens
        assert length * 0.8 < tokens <= length
        # the answer is there before the question, and answering it scores 1
        if name not in ("ruler_qa_1", "ruler_qa_2", "niah"):
            assert all(answer in sample.document for answer in sample.answers)
        assert set(task.score(sample, " and ".join(sample.answers)).values()) == {1.0}
        assert set(task.score(sample, "nothing").values()) == {0.0}
    again = task.load(context).samples
    assert again == samples
    assert task.load(Context(context.source, context.encoder, 3, length, 1)).samples != samples


def test_ruler_counts_what_it_says(ruler: Path) -> None:
    value = load(ruler, "ruler_niah_multivalue", 1, 3000).samples[0]
    assert len(value.answers) == 4 and value.document.count("One of the special magic numbers for") == 4
    assert value.question.startswith("\nWhat are all the special magic numbers for ")
    query = load(ruler, "ruler_niah_multiquery", 1, 3000).samples[0]
    assert len(query.answers) == 4 and query.question.count(", ") == 3 and ", and " in query.question
    key = load(ruler, "ruler_niah_multikey_1", 1, 3000).samples[0]
    assert len(key.answers) == 1 and key.document.count("One of the special magic numbers for") == 4
    assert key.prefix.endswith(" mentioned in the provided text is")
    track = load(ruler, "ruler_vt", 1, 3000).samples[0]
    number = track.question.partition("value ")[2].partition(" ")[0]
    assert track.document.count("VAR ") == 2 * 9 and f"VAR {track.answers[0]} = {number}" in track.document
    words = load(ruler, "ruler_cwe", 1, 6000).samples[0]
    listed = words.document.rpartition("Memorize the ones")[2].split()
    assert {listed.count(one) for one in words.answers} == {30}
    assert max(listed.count(one) for one in set(listed) - set(words.answers)) == 3
    often = load(ruler, "ruler_fwe", 1, 3000).samples[0]
    coded = often.document.split("words. ")[1].split()
    counts = [coded.count(one) for one in ("...", *often.answers)]
    assert counts == sorted(counts, reverse=True) and counts[0] / counts[1] == pytest.approx(4, rel=0.1)


def test_essays_are_the_haystack_when_they_are_there(ruler: Path, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "data"
    shutil.copytree(ruler, folder)
    assert "SQuAD paragraphs" in load(folder, "ruler_niah_single_2", 1, 1500).notes[0]
    (folder / "ruler/essays").mkdir()
    (folder / "ruler/essays/a.txt").write_text("I wrote this. And that.")
    loaded = load(folder, "ruler_niah_single_2", 1, 1500)
    assert loaded.notes == ("haystack: essays",) and "I wrote this." in loaded.samples[0].document


def test_a_length_that_nothing_fits_is_an_error() -> None:
    with pytest.raises(ValueError, match="passkey: the shortest prompt does not fit --length 40"):
        load(None, "passkey", 1, 40)


def test_the_passkey_needs_no_data_and_goes_through_all_depths() -> None:
    found = load(None, "passkey", length=1500).samples
    assert [sample.tags["depth"] for sample in found] == [i / 10 for i in range(11)]
    places = [sample.document.index("The pass key is") for sample in found]
    assert places == sorted(places)


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        MissingData, match=r"there is no ruler/hotpotqa\*.jsonl or hotpotqa\*.jsonl below the data folder"
    ):
        load(tmp_path, "ruler_qa_2", 1)
    with pytest.raises(MissingData, match="is not on the hub; give its folder with --data"):
        load(None, "kv_retrieval", 1)


def test_choose() -> None:
    assert [(task.name, named) for task, named in choose("coqa, gsm8k,coqa")] == [("coqa", True), ("gsm8k", True)]
    chosen = dict((task.name, named) for task, named in choose("ruler,ruler_vt"))
    assert len(chosen) == 13 and [name for name, named in chosen.items() if named] == ["ruler_vt"]
    assert len(choose("longbench")) == 16
    with pytest.raises(ValueError, match="unknown task 'coca'; did you mean 'coqa'?"):
        choose("coca")
    with pytest.raises(ValueError, match="names no task"):
        choose(" , ")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def serve(answer: Callable[..., Any]) -> None:
        module = types.ModuleType("datasets")
        module.load_dataset = answer  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", module)

    return serve


def test_rows_come_from_the_hub_without_a_folder(hub: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def serve(name: str, configuration: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((name, configuration, split))
        if name == "openai/gsm8k":
            return [GSM, {"question": "?"}]
        if name == "Salesforce/wikitext":
            return [{"text": "w1w2" * 40}]
        return [{**COQA, "answers": {"input_text": ["a cat", "home"]}}]

    hub(serve)
    loaded = load(None, "gsm8k_chat")
    assert len(loaded.samples) == 1 and str(loaded.faults[0]) == "openai/gsm8k:test, line 2: it has no field 'answer'"
    assert load(None, "coqa").samples[1].answers == ("home",)
    assert len(load(None, "wikitext", length=16).samples) == 5
    assert asked[0] == ("openai/gsm8k", "main", "test")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no network")

    hub(fail)
    with pytest.raises(MissingData, match=r"cannot load openai/gsm8k from the hub \(no network\); give --data FOLDER"):
        load(None, "gsm8k_chat")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingData, match="needs the package datasets"):
        load(None, "gsm8k_chat")
