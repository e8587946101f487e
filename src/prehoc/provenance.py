"""Where a number comes from: machine, versions and command, without naming a folder of the machine."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from prehoc import config

VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "asimd": "NEON"}
"""Vector instructions by their name in /proc/cpuinfo, widest first."""


def machine() -> dict[str, Any]:
    """Return processor, its number of cores, torch threads and accelerators."""
    import torch

    return {
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": platform.system(),
    }


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that decide a result."""
    packages = ("prehoc", "torch", "transformers", "tokenizers", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def version(package: str) -> str | None:
    """Return the installed version of a package, or None; torch's names its build, CPU or CUDA."""
    if package == "torch":
        import torch

        return torch.__version__  # the distribution's version need not name the build
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        if package != "prehoc":
            return None
        import prehoc  # run from its source

        return prehoc.__version__


def cpu_name() -> str:
    """Return the processor's name and its widest vectors: hosts give processors years apart the same name."""
    name = cpuinfo("model name") or platform.processor() or platform.machine()
    flags = (cpuinfo("flags") or cpuinfo("Features") or "").split()
    widest = next((vectors for flag, vectors in VECTORS.items() if flag in flags), None)
    return f"{name} with {widest}" if widest else name


def cpuinfo(key: str) -> str | None:
    """Return a field of Linux's /proc/cpuinfo, or None."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return None
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def command() -> str:
    """Return this process's command line, with the folders of the machine replaced by what names them."""
    words = [hide_folders(word) for word in sys.argv[1:]]
    program = Path(sys.argv[0]).name
    program = "prehoc" if program == "__main__.py" else program  # python -m prehoc.cli
    return " ".join([program, *(f"'{word}'" if " " in word else word for word in words)])


def hide_folders(text: str) -> str:
    """Return `text` with the data folder as ``$PREHOC_DATA``, the model cache as ``$PREHOC_CACHE`` and the home as ``~``."""
    folders = {"$PREHOC_DATA": config.data_dir(), "$PREHOC_CACHE": config.cache_dir(), "~": Path.home()}
    for name, folder in folders.items():
        if folder is not None and len(folder.parts) > 1:
            text = text.replace(str(folder), name)
    return text


def describe_text(path: Path, content: bytes) -> dict[str, Any]:
    """Return name, size and SHA-256 of a text file, which together identify it anywhere."""
    return {"file": path.name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
