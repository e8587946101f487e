"""`prehoc generate`: prompts, checks before any work, answers, the comparison."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaForCausalLM

from prehoc import cli, files, models
from prehoc.cli import _answers, _prompt

Run = Callable[..., int]

DOCUMENT = (
    "The harbour master of Port Ellin is called Mara Voss. She keeps a green ledger of every ship that comes in.\n"
    "The largest ship of last winter was the Halcyon, with oranges and copper wire on board.\n"
) * 4


_load = functools.cache(models.load)  # the same model for all tests of this file


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    import torch

    def load(model: str, dtype: str, device: str, progress: Any = None) -> Any:
        return _load(model, dtype, device=device)

    def call(*args: str) -> int:
        monkeypatch.setattr(sys, "argv", ["prehoc", "generate", *args])
        try:
            cli.main()
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    threads = torch.get_num_threads()
    monkeypatch.setattr(models, "load", load)
    yield call
    torch.set_num_threads(threads)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "harbour.txt"
    path.write_text(DOCUMENT)
    return path


@pytest.fixture
def no_load(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading weights fails the test: the fault must be found before."""

    def load(*args: Any, **kwargs: Any) -> Any:
        pytest.fail("the weights were loaded before the fault was reported")

    monkeypatch.setattr(models, "load", load)


def args(model: Path, file: Path, *more: str) -> list[str]:
    return [
        "--model",
        str(model),
        "--prompt-file",
        str(file),
        "--ask",
        "Who is the harbour master?",
        "--threads",
        "1",
        *more,
    ]


def test_streams_the_answer_then_the_report(
    run: Run, smollm2_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = args(smollm2_path, file, "--method", "cis", "--budget", "96", "--max-new-tokens", "12")
    assert run(*some) == 0
    captured = capsys.readouterr()
    answer, _, report = captured.out.partition("\n\n")
    assert run(*some, "--json") == 0
    assert answer.strip() == json.loads(capsys.readouterr().out)["answers"][0]["text"] != ""
    assert report.startswith("method           cis:budget=96\n")
    assert "96 keys (8 sink + 56 critical + 32 local)" in report
    assert "first token" in report
    assert "cis: reading" in captured.err, "progress goes to stderr"


def test_compare_json(run: Run, smollm2_path: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(
            *args(smollm2_path, file, "--method", "cis:tau=0.9", "--budget", "96", "--set", "block_size=4"),
            *("--compare", "dense", "--max-new-tokens", "12", "--audit", "1", "--json"),
        )
        == 0
    )
    document = json.loads(capsys.readouterr().out)
    dense, cis = document["answers"]
    assert dense["method"] == "dense"
    assert cis["method"] == "cis:budget=96,block_size=4,tau=0.9"
    assert document["versions"]["prehoc"]
    assert document["machine"]["torch_threads"] == 1 and document["device"] == "cpu"
    assert document["command"].startswith("prehoc generate --model")
    for one in (dense, cis):
        assert 0 < len(one["tokens"]) <= 12
        assert one["first_token_seconds"] > 0
        assert one["prefill_tokens_per_second"] > 0
        assert one["decode_tokens_per_second"] > 0
    reads = cis["report"]["decode"]
    assert reads["keys_read"] < reads["keys_visible"]
    assert dense["report"]["decode"]["bytes_read"] == dense["report"]["decode"]["bytes_dense"]
    assert cis["report"]["audited"] > 0
    assert 0 < cis["report"]["retained_mass"]["mean"] <= 1
    differs = [a != b for a, b in zip(dense["tokens"], cis["tokens"], strict=False)]
    assert document["tokens_in_common"] == (differs.index(True) if True in differs else len(differs))


def test_a_budget_that_covers_the_text_agrees_with_dense(
    run: Run, smollm2_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(
            *args(smollm2_path, file, "--method", "cis", "--budget", "4096", "--compare", "dense"),
            *("--max-new-tokens", "8"),
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "all tokens are the same" in out
    for row in ("time to first token", "decode", "keys read", "bytes read", "retained mass", "answer"):
        assert row in out
    assert out.count("1, every key is read") == 2


def test_packed_layers_write_the_same(
    run: Run, smollm2_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = args(smollm2_path, file, "--method", "cis", "--budget", "96", "--max-new-tokens", "8", "--json")
    tokens = []
    for more in ((), ("--pack",)):
        assert run(*asked, *more) == 0
        document = json.loads(capsys.readouterr().out)
        tokens.append(document["answers"][0]["tokens"])
        assert document["settings"]["pack"] is bool(more)
    assert tokens[0] == tokens[1]


def test_sampling_follows_the_seed(
    run: Run, smollm2_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tokens(seed: str) -> Any:
        more = ("--temperature", "1.5", "--seed", seed, "--max-new-tokens", "8", "--method", "dense", "--json")
        assert run(*args(smollm2_path, file, *more)) == 0
        return json.loads(capsys.readouterr().out)["answers"][0]["tokens"]

    assert tokens("1") == tokens("1")
    assert tokens("1") != tokens("2")


def test_one_token_has_no_decode(run: Run, smollm2_path: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*args(smollm2_path, file, "--compare", "dense", "--max-new-tokens", "1", "--json")) == 0
    for one in json.loads(capsys.readouterr().out)["answers"]:
        assert one["decode_tokens_per_second"] is None
    assert run(*args(smollm2_path, file, "--compare", "dense", "--max-new-tokens", "1")) == 0
    assert run(*args(smollm2_path, file, "--max-new-tokens", "1")) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b" \n\t ", "is empty"),
        (b"caf\xe9 au lait", "is not UTF-8: byte 3 is 0xe9; convert it first"),
    ],
)
def test_bad_files(
    run: Run, tmp_path: Path, content: bytes | None, message: str, no_load: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompt.txt"
    if content is not None:
        path.write_bytes(content)
    assert run(*args(Path("smollm2-135m-instruct"), path)) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_folder_is_no_prompt(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*args(Path("smollm2-135m-instruct"), tmp_path)) == 2
    assert "is a folder; give a text file" in capsys.readouterr().err


def test_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"\xef\xbb\xbfhello")
    assert files.read_text(path)[0] == "hello"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--method", "cpee"), "unknown method 'cpee'; did you mean 'cpe'"),
        (("--method", "cis:tao=0.5"), "unknown key 'tao' for method 'cis'; did you mean 'tau'"),
        (("--set", "tau"), "'tau' is not key=value"),
        (("--set", "tau=2"), "tau=2.0 must lie in [-1.0, 1.0]"),
        (("--budget", "20"), "budget=20 is too small"),
        (("--budget", "96", "--set", "budget=97"), "both set the budget"),
        (
            ("--method", "cis:budget=64", "--budget", "96"),
            "budget=64 in 'cis:budget=64' and budget=96 beside it; give one",
        ),
        (("--method", "cis:tau=0.5", "--set", "tau=0.6"), "tau=0.5 in 'cis:tau=0.5' and tau=0.6 beside it; give one"),
        (("--method", "dense", "--budget", "96"), "method 'dense' takes no keys, but budget was given"),
        (("--compare", "dens"), "did you mean 'dense'"),
        (("--backend", "cuda"), "unknown backend 'cuda'"),
        (("--dtype", "int8"), "unknown dtype 'int8'"),
        (("--device", "gpu"), "unknown device 'gpu'; did you mean 'cpu'"),
        (("--temperature", "-1"), "--temperature -1.0 must be 0"),
        (("--audit", "2"), "audit=2.0 must lie in [0.0, 1.0]"),
        (("--max-new-tokens", "0"), "max-new-tokens"),
    ],
)
def test_bad_options(
    run: Run,
    file: Path,
    smollm2_path: Path,
    more: tuple[str, ...],
    message: str,
    no_load: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(*args(smollm2_path, file, *more)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("there", [False, True])
def test_the_device_is_checked_and_given_to_the_model(
    run: Run,
    smollm2_path: Path,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    there: bool,
) -> None:
    import torch

    given: list[Any] = []

    def load(*args: Any, device: str, **kwargs: Any) -> Any:
        given.append(device)
        raise ValueError("loaded")

    monkeypatch.setattr(models, "load", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert run(*args(smollm2_path, file, "--device", "cuda")) == 2
    assert ("loaded" if there else "device 'cuda' is not available to torch here; use cpu") in capsys.readouterr().err
    assert given == ["cuda"] * there


def test_unknown_model(run: Run, file: Path, no_load: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*args(Path("smollm2-135m-instuct"), file)) == 2
    assert "did you mean 'smollm2-135m-instruct'" in capsys.readouterr().err


def test_too_long_names_both_numbers_before_the_weights_are_loaded(
    run: Run, smollm2_path: Path, tmp_path: Path, no_load: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.txt"
    path.write_text("harbour " * 9000)
    assert run(*args(smollm2_path, path, "--max-new-tokens", "50")) == 2
    err = capsys.readouterr().err
    assert "the prompt has 90" in err
    assert "50 are to be generated, but the model has 8192 positions; add --truncate" in err


def reader(path: Path) -> _prompt.Reader:
    return _prompt.Reader.of(models.resolve(str(path)))


def test_truncate_keeps_head_and_tail(smollm2_path: Path) -> None:
    known = reader(smollm2_path)
    text = "First words. " + "Some water under the bridge. " * 3000 + "Last words."
    for new_tokens in (1, 500, 8000):
        ids, cut = known.fit(text, "What is said?", new_tokens, truncate=True)
        assert 8192 - new_tokens - 40 < len(ids) <= 8192 - new_tokens, "it fits, and little room is wasted"
        shown = known.tokenizer.decode(ids)
        assert "First words." in shown and "Last words." in shown and "[...]" in shown and "What is said?" in shown
        assert 0 < cut < len(text)


@pytest.mark.parametrize(("text", "ask", "new_tokens"), [("word " * 9000, "why? " * 9000, 10), ("word", "why?", 8190)])
@pytest.mark.parametrize("truncate", [False, True])
def test_truncate_is_not_the_advice_where_it_cannot_help(
    smollm2_path: Path, text: str, ask: str, new_tokens: int, truncate: bool
) -> None:
    message = (
        f"^{new_tokens} tokens are to be generated and the question alone takes .* give a smaller --max-new-tokens"
    )
    with pytest.raises(ValueError, match=message) as error:
        reader(smollm2_path).fit(text, ask, new_tokens, truncate=truncate)
    assert "--truncate" not in str(error.value)


def test_chat_template_puts_the_question_behind_the_document(smollm2_path: Path) -> None:
    known = reader(smollm2_path)
    shown = known.tokenizer.decode(known.encode("A text.\n\n", "A question?"))
    assert shown.endswith("<|im_start|>user\nA text.\n\nA question?<|im_end|>\n<|im_start|>assistant\n")
    assert shown.count("<|im_start|>system") == 1
    alone = known.tokenizer.decode(known.encode("A text.", ""))
    assert "<|im_start|>user\nA text.<|im_end|>" in alone


def test_base_model_gets_plain_text(smollm2_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    for part in smollm2_path.iterdir():
        if part.name == "model.safetensors":
            (folder / part.name).symlink_to(part)
        elif part.name != "chat_template.jinja":
            shutil.copy(part, folder / part.name)
    known = reader(folder)
    assert known.tokenizer.decode(known.encode("A text.", "A question?")) == "A text.\n\nA question?"


def test_agreement_stops_at_the_first_difference() -> None:
    def one(*tokens: int) -> Any:
        return _answers.Answer(tokens, "", 1, 1.0, 1.0, None)  # type: ignore[arg-type]

    assert _answers.agreement(one(1, 2, 3), one(1, 2, 3)) == 3
    assert _answers.agreement(one(1, 2, 3, 4), one(1, 5, 3, 4)) == 1
    assert _answers.agreement(one(1, 2), one(1, 2, 3)) == 2


@pytest.mark.parametrize("method", ["psaw:start_layer=7", "cpe:etf_start_layer=7"])
def test_a_method_that_does_not_fit_the_model_is_refused_before_the_first_answer(
    tiny_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    folder = tiny_llama({"text.txt": 100})
    monkeypatch.setattr(LlamaForCausalLM, "forward", None)
    words = ["--prompt-file", str(folder / "text.txt"), "--compare", "dense", "--method", method]
    monkeypatch.setattr(sys, "argv", ["prehoc", "generate", "--model", str(folder), *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    assert stop.value.code == 2 and "start_layer=7" in captured.err
    assert captured.out == "" and "dense: reading" not in captured.err


def test_shared_keys_on_a_mixed_model_are_refused_before_the_first_answer(
    tiny_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = tmp_path / "gemma"
    shutil.copytree(tiny_llama({"text.txt": 100}), folder)
    config = Gemma3TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    monkeypatch.setattr(Gemma3ForCausalLM, "forward", None)
    words = ["--prompt-file", str(folder / "text.txt"), "--compare", "dense", "--method", "etf:kv=share"]
    monkeypatch.setattr(sys, "argv", ["prehoc", "generate", "--model", str(folder), *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2 and "use kv=" in capsys.readouterr().err
