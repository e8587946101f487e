"""``prehoc env``: what this machine is and has."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from prehoc import config, provenance
from prehoc.cli import _common

PACKAGES = ("prehoc", "torch", "transformers", "tokenizers", "safetensors", "numpy", "triton", "vllm", "lm-eval")
# those that decide which kernel can run
FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "amx_bf16",
    "asimd",
    "bf16",
    "sve",
)


def command(as_json: _common.Json = False) -> None:
    """Show versions, processor, threads, torch build, GPU, compiler and folders."""
    facts = gather()
    if as_json:
        _common.emit_json(facts)
        return
    width = max(len(key) for key in facts)
    for key, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{name} {version}" for name, version in value.items() if version is not None)
        elif isinstance(value, list):
            value = ", ".join(value) or "none"
        print(f"{key:<{width}}  {'none' if value is None else value}")


def gather() -> dict[str, Any]:
    """Collect the facts, every value ready for JSON."""
    import torch

    data = config.data_dir()
    return {
        "versions": {name: provenance.version(name) for name in PACKAGES},
        "transformers_supported": _supported("transformers"),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu": provenance.cpu_name(),
        "cpu_flags": _cpu_flags(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "compiler": _compiler(),
        "backend": config.default_backend(),
        "cache": str(config.cache_dir()),
        "cache_free_bytes": _free_bytes(config.cache_dir()),
        "data": None if data is None else str(data),
    }


def _supported(package: str) -> str | None:
    """Return the range our own metadata asks for; None when prehoc runs without being installed."""
    try:
        needs = metadata.requires("prehoc") or []
    except metadata.PackageNotFoundError:
        return None
    for need in needs:
        rest = need.removeprefix(package)
        if rest != need and rest[:1] in "<>=!~ (":
            return rest.strip(" ()")
    return None


def _cpu_flags() -> list[str]:
    present = (provenance.cpuinfo("flags") or provenance.cpuinfo("Features") or "").split()
    return [flag for flag in FLAGS if flag in present]


def _compiler() -> str | None:
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            run = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            return f"{path} ({run.stdout.splitlines()[0]})" if run.returncode == 0 and run.stdout else path
    return None


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
