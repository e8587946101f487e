"""The Triton backend where no GPU is: its kernels interpreted, its kernels compiled, and what the registry says of it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from prehoc import kernels

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed: it comes with torch for CUDA, or with [dev]",
)


def python(*args: str, **environment: str) -> str:
    """Run a fresh interpreter: Triton decides when it is imported whether it interprets."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *args], env={**inherited, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    return done.stdout


@needs_triton
def test_interpreted_kernels_equal_the_reference() -> None:
    plain = ("-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-p", "no:warnings")
    out = python(*plain, str(HERE / "triton_checks.py"), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert " passed" in out and "skipped" not in out


# bytes of shared memory that one block may use
@needs_triton
@pytest.mark.parametrize(
    ("capability", "shared"),
    [pytest.param(80, 166_912, marks=pytest.mark.slow), (90, 232_448)],
    ids=["Ampere", "Hopper"],
)
def test_every_kernel_compiles_for(capability: int, shared: int, tmp_path: Path) -> None:
    out = python(str(HERE / "triton_compile.py"), str(capability), TRITON_CACHE_DIR=str(tmp_path))
    made = [json.loads(line) for line in out.splitlines()]
    assert {kernel["name"] for kernel in made} == {
        "_attend", "_merge", "_score", "_relate", "_select", "_order", "_dilate", "_prefill", "_gate"
    }  # fmt: skip
    assert max(kernel["shared"] for kernel in made) <= shared
    # the first shape is a bfloat16 group of four: its products belong on tensor cores
    first = {kernel["name"]: kernel["tensor_cores"] for kernel in reversed(made)}
    assert {name for name, used in first.items() if used} == {"_attend", "_score", "_prefill"}


# ------------------------------------------------------------------------------------------------------------ registry


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """Let the registry ask again, now and afterwards."""
    memories = (kernels._triton_fails, kernels._runs_or_warning)
    for memory in memories:
        memory.cache_clear()
    yield
    for memory in memories:
        memory.cache_clear()


@needs_triton
def test_on_the_cpu_it_is_refused() -> None:
    wanted = (
        r"backend 'triton' cannot run here: it needs a CUDA device, not cpu \(TRITON_INTERPRET=1 .* backend 'reference'"
    )
    with pytest.raises(ValueError, match=wanted):
        kernels.resolve("triton", torch.device("cpu"))
    with pytest.raises(ValueError, match="cannot run with torch.float64; use auto or reference"):
        kernels.resolve("triton", torch.device("cpu"), torch.float64)
    ops = kernels.get("triton", torch.device("cpu"))
    x = torch.zeros(1, 1, 4)
    with pytest.raises(ValueError, match="the triton backend cannot run on the CPU; use backend 'cpu' or 'reference'"):
        ops.decode_dense(x, x[:, None], x[:, None], (0,), 0, (0,), 1.0)


@needs_triton
def test_auto_takes_it_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert kernels.resolve("auto", cuda) == kernels.resolve("triton", cuda) == "triton"
    kernels._triton_fails.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=r"cuda:0 has compute capability 7.5; it needs 8.0 \(Ampere\) or later"):
        kernels.resolve("triton", cuda)


@needs_triton
def test_auto_without_a_device_falls_back_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(RuntimeWarning, match="slow torch kernels: torch finds no CUDA device"):
        assert kernels.resolve("auto", torch.device("cuda")) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.resolve("auto", torch.device("cuda")) == "reference"


def test_without_triton_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(kernels, "importlib", SimpleNamespace(import_module=missing))
    with pytest.raises(ValueError, match="cannot run here: No module named 'triton'; install triton, the version that"):
        kernels.resolve("triton", torch.device("cuda"))
    with pytest.warns(RuntimeWarning, match="slow torch kernels: No module named 'triton'"):
        assert kernels.resolve("auto", torch.device("cuda")) == "reference"
