"""The harness runs a local task under a method, and continuations are decoded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install prehoc[lm-eval]")

from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

import prehoc  # noqa: E402
from eval.words import save_model  # noqa: E402
from prehoc.integrations.lm_eval import PrehocLM  # noqa: E402
from prehoc.trace import forced_logits  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


def words(count: int, begin: int = 0) -> str:
    return "".join(f"w{(begin + 7 * i) % 60}" for i in range(count))


def make(folder: Path, method: str = "cis", **more: Any) -> PrehocLM:
    keys = {} if method == "dense" else {"critical": 5, "sink": 2, "local": 3}
    return PrehocLM(str(folder), method=method, device="cpu", **{**keys, **more})


def expected(model: Any, method: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Decode the continuation, and the context's last token, one by one."""
    ids = torch.tensor([context + continuation])
    with prehoc.sparsify(model, method):
        logits = torch.cat(
            list(forced_logits(model, ids, len(context) - 1))
        )  # behind each token from the context's last but one
    logs = logits[1:-1].log_softmax(-1)
    score = logs.gather(1, torch.tensor(continuation)[:, None]).sum()
    return float(score), logs.argmax(-1).tolist() == continuation


@pytest.mark.parametrize("method", ["dense", "cis"])
def test_continuations_are_scored_by_decode(folder: Path, method: str) -> None:
    lm = make(folder, method)
    context = lm.tok_encode(words(40))
    conts = [lm.tok_encode(words(n, 5)) for n in (1, 4)]
    other = lm.tok_encode(words(30, 3))
    requests = [(None, context, conts[0]), (None, other, conts[0]), (None, context, conts[1])]
    found = lm._loglikelihood_tokens(requests)
    for (score, greedy), (_, ctx, cont) in zip(found, requests, strict=True):
        wanted = expected(lm.model, lm.method, ctx, cont)
        assert score == pytest.approx(wanted[0], rel=1e-5) and greedy == wanted[1]
    assert lm.traffic.steps == 1 + 1 + 4, "every scored token came out of a decode step"
    if method == "cis":
        assert lm.traffic.counted_triples > 0
        dense = make(folder, "dense")._loglikelihood_tokens(requests)
        assert max(abs(a[0] - b[0]) for a, b in zip(found, dense, strict=True)) > 1e-4


def test_the_likeliest_continuation_is_greedy(folder: Path) -> None:
    lm = make(folder)
    context = lm.tok_encode(words(40))
    with prehoc.sparsify(lm.model, lm.method):
        logits = list(forced_logits(lm.model, torch.tensor([context]), 39))[-1]
    best = int(logits.argmax())
    ((_, greedy), (_, other)) = lm._loglikelihood_tokens([(None, context, [best]), (None, context, [(best + 1) % 60])])
    assert greedy and not other


def test_a_local_task_runs_offline(folder: Path, tmp_path: Path) -> None:
    rows = [{"text": words(40, i), "a": f"w{i}", "b": f"w{i + 9}", "label": i % 2} for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "rows.jsonl"}}}}}
test_split: test
doc_to_text: "{{{{text}}}}"
"""
    (tmp_path / "choose.yaml").write_text(
        f"task: tiny_choose{head}"
        'output_type: multiple_choice\ndoc_to_choice: ["{{a}}", "{{b}}"]\ndoc_to_target: label\nmetric_list: [{metric: acc}]\n'
    )
    (tmp_path / "write.yaml").write_text(
        f'task: tiny_write{head}output_type: generate_until\ndoc_to_target: "{{{{a}}}}"\n'
        "generation_kwargs: {max_gen_toks: 5, do_sample: false, until: []}\nmetric_list: [{metric: exact_match}]\n"
    )
    (tmp_path / "roll.yaml").write_text(
        f'task: tiny_roll{head}output_type: loglikelihood_rolling\ndoc_to_target: "{{{{text}}}}"\n'
        "metric_list: [{metric: word_perplexity}]\n"
    )
    found = simple_evaluate(
        model="prehoc",
        model_args={"pretrained": str(folder), "method": "cis", "critical": 5, "sink": 2, "local": 3, "audit": 0.5},
        tasks=["tiny_choose", "tiny_write", "tiny_roll"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        device="cpu",
        bootstrap_iters=0,
    )
    results, info = found["results"], found["config"]["prehoc"]
    assert 0 <= results["tiny_choose"]["acc,none"] <= 1
    assert results["tiny_write"]["exact_match,none"] == 0
    assert results["tiny_roll"]["word_perplexity,none"] > 1
    assert info["method"] == "cis:critical=5,sink=2,local=3"
    assert info["counted_triples"] > 0 and 0 < info["retained_mass"] < 1 and info["audited"] > 0


def test_the_model_is_registered_and_left_as_it_was(folder: Path) -> None:
    assert get_model("prehoc") is PrehocLM
    lm = make(folder)
    lm._loglikelihood_tokens([(None, lm.tok_encode(words(20)), [3])])
    assert not hasattr(lm.model, "_prehoc_session")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"method": "sis"}, "unknown method 'sis'; did you mean 'cis'"),
        ({"budget": 10}, "budget=10 is too small"),
        ({"audit": 3}, "audit=3 must lie in"),
    ],
)
def test_bad_arguments_are_named(folder: Path, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrehocLM(str(folder), device="cpu", **how)
