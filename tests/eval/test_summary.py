"""Tables: means, intervals and differences by hand, and when a table is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from prehoc.eval.summary import summarise
from prehoc.eval.tasks import TASKS
from prehoc.methods import parse_method

METHODS = [parse_method(name) for name in ("dense", "oracle:critical=24", "cis:critical=24")]
NAMES = ("dense", "oracle:critical=24", "cis:critical=24")


def line(sample: str, method: str, score: float, **more: Any) -> dict[str, Any]:
    dense = method == "dense"
    traffic = {
        "triples": 10.0,
        "counted_triples": 0.0 if dense else 8.0,
        "retrievals": 0.0 if dense else 2.0,
        "keys_read": 1000.0 if dense else 300.0,
        "keys_visible": 1000.0,
        "bytes_read": 4000.0 if dense else 1500.0,
        "bytes_dense": 4000.0,
    }
    return {
        "sample": sample,
        "method": method,
        "scores": {"found": score},
        "decoded": 5,
        "cut_tokens": 0,
        "prompt_tokens": 100,
        "agreement": 1.0 if dense else 0.5,
        "kl": None if dense else 0.25,
        "batch": sample,
        "audited": 0 if dense else 4,
        "retained_mass": None if dense else {"oracle:critical=24": 0.9, "cis:critical=24": 0.8}[method],
        "seconds": 0.5,
        "prefill_seconds": 2.0,
        "prefill_operations": 60.0,
        "prefill_operations_dense": 100.0,
        "tags": {},
        "traffic": {**traffic, **more.pop("traffic", {})},
        **more,
    }


def table(scores: dict[str, list[float]], task: str = "kv_retrieval", **more: Any) -> dict[str, Any]:
    lines = [line(f"s{i}", name, value, **more) for name, values in scores.items() for i, value in enumerate(values)]
    return summarise(TASKS[task], METHODS, lines, decode_question=True)


def test_rows_by_hand() -> None:
    found = table({"dense": [1, 1, 1, 0], "oracle:critical=24": [1, 1, 0, 0], "cis:critical=24": [1, 1, 0, 1]})
    assert found["refused"] is None and not found["not_informative"]
    dense, oracle, cis = found["rows"]
    assert dense["scores"]["found"]["mean"] == 75 and oracle["scores"]["found"]["mean"] == 50
    assert oracle["scores"]["found"]["difference"]["mean"] == -25
    assert cis["scores"]["found"]["difference"]["mean"] == 0
    assert cis["scores"]["found"]["difference"]["low"] < 0 < cis["scores"]["found"]["difference"]["high"]
    assert dense["n"] == 4 and cis["decoded"] == 20 and cis["query_aware"] is False
    assert cis["retrieval_ratio"] == 0.25 and dense["retrieval_ratio"] is None
    assert (cis["keys"], cis["keys_visible"], cis["bytes_per_token"], cis["bytes_share"]) == (30, 100, 300, 0.375)
    assert cis["seconds_per_token"] == pytest.approx(0.1) and cis["prefill_share"] == pytest.approx(0.6)
    assert cis["retained_mass"]["mean"] == pytest.approx(0.8) and cis["retained_mass"]["n"] == 16
    assert cis["beta"]["mean"] == pytest.approx(0.1) and oracle["beta"] is None and dense["beta"] is None
    assert cis["kl"]["mean"] == 0.25 and cis["agreement"] == 0.5 and dense["kl"] is None


def test_audits_are_those_of_each_sample() -> None:
    rows = [line("s1", name, 1.0, batch="s1") for name in NAMES]
    rows += [line("s2", name, 1.0, batch="s1", audited=40, retained_mass=0.6) for name in NAMES]
    rows += [line("s3", name, 1.0, batch="s1", audited=0, retained_mass=None) for name in NAMES]  # ended at once
    found = summarise(TASKS["kv_retrieval"], METHODS, rows, decode_question=False)["rows"]
    assert found[2]["retained_mass"]["n"] == 4 + 40
    # every sample counts the same, however many of its triples were audited
    assert found[2]["retained_mass"]["mean"] == pytest.approx((0.8 + 0.6) / 2) and found[2]["query_aware"] is True


def test_perplexities_are_exponentials_and_their_differences_relative() -> None:
    lines = []
    for name, shift in zip(NAMES, (0.0, 0.01, 0.02), strict=True):
        for i, nll in enumerate((2.0, 3.0)):
            prefill = None if name == "cis:critical=24" else nll
            lines.append(line(f"s{i}", name, 0) | {"scores": {"decode": nll + shift, "prefill": prefill}})
    found = summarise(TASKS["wikitext"], METHODS, lines, decode_question=False)["rows"]
    assert found[0]["scores"]["decode"]["mean"] == pytest.approx(math.exp(2.5))
    assert found[2]["scores"]["decode"]["difference"]["mean"] == pytest.approx(100 * math.expm1(0.02))
    assert found[2]["scores"]["prefill"]["mean"] is None and found[0]["query_aware"] is None


def test_a_budget_that_covers_every_prompt_is_covered() -> None:
    found = table({name: [1.0, 0.5] for name in NAMES}, traffic={"keys_read": 1000.0})
    assert [row["covered"] for row in found["rows"]] == [False, True, True]
    assert found["rows"][1]["covered_samples"] == 2


@pytest.mark.parametrize(
    ("scores", "task", "informative"),
    [
        ([0.0, 0.0, 0.0], "kv_retrieval", False),
        ([1.0, 1.0, 1.0], "kv_retrieval", True),
        ([0.0, 0.0, 0.0, 1.0], "kv_retrieval", False),  # the interval reaches the floor
        ([1.0, 0.0, 0.0, 0.0], "longbench2", False),  # guessing gives a quarter
        ([1.0, 1.0, 1.0, 1.0], "longbench2", True),
        ([1.0], "kv_retrieval", True),
    ],
)
def test_dense_at_the_floor_says_nothing(scores: list[float], task: str, informative: bool) -> None:
    name = TASKS[task].metrics[0].name
    lines = [line(f"s{i}", m, 0) | {"scores": {name: value}} for m in NAMES for i, value in enumerate(scores)]
    found = summarise(TASKS[task], METHODS, lines, decode_question=True)
    assert found["refused"] is None
    assert found["not_informative"] is not informative
    assert any("not informative" in note for note in found["notes"]) is not informative


def test_a_task_is_split_by_its_tag() -> None:
    lines = [
        line(f"s{i}", name, 0) | {"scores": {"accuracy": score}, "tags": {"difficulty": level}}
        for name in NAMES
        for i, (score, level) in enumerate([(1.0, "hard"), (0.0, "easy"), (0.0, "hard"), (1.0, None)])
    ]
    split = summarise(TASKS["longbench2"], METHODS, lines, decode_question=True)["rows"][1]["split"]
    assert list(split) == ["easy", "hard"] and split["easy"] == {"mean": 0, "low": None, "high": None, "n": 1}
    assert (split["hard"]["mean"], split["hard"]["low"], split["hard"]["high"], split["hard"]["n"]) == (50, 0, 100, 2)


def refused(lines: list[dict[str, Any]], task: str = "kv_retrieval") -> str:
    found = summarise(TASKS[task], METHODS, lines, decode_question=False)["refused"]
    assert isinstance(found, str)
    return found


def test_tables_that_must_not_be_printed() -> None:
    good = [line("s0", name, 1.0) for name in NAMES]
    assert refused([]) == "there is no dense row to compare with"
    assert refused(good[1:]) == "there is no dense row to compare with"
    assert refused(good[:2]) == "cis:critical=24 has 0 samples and dense 1; run it again to finish"
    coqa = [one | {"scores": {"f1": 0.002, "em": 0.0}} for one in good]
    assert "dense has f1 0.20, outside the plausible range 1 to 100: look at the outputs" in refused(coqa, "coqa")
    rouge = [one | {"scores": {"rouge_l": 0.8}} for one in good]
    assert "outside the plausible range 2 to 60" in refused(rouge, "longbench_gov_report")
    still = [one | {"decoded": 0} if one["method"] != "dense" else one for one in good]
    assert "no token was decoded under oracle:critical=24" in refused(still)
    assert "--decode-question" in refused(still)


def test_notes() -> None:
    found = table({name: [1.0, 1.0] for name in NAMES}, agreement=1.0, cut_tokens=3)
    assert found["notes"] == [
        "every method gave dense's own answers, token by token",
        "2 of 2 documents lost their middle to fit",
    ]
