"""Compile the C++ kernels once, on first use, with the system's compiler, into the user's cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from prehoc import provenance
from prehoc.config import cache_dir

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-std=c++17", "-fPIC", "-fopenmp")


class BuildError(RuntimeError):
    """The kernels could not be compiled; the message says why and what to do."""


@functools.cache
def library() -> ctypes.CDLL:
    """Return the compiled kernels, compiling them if this source, compiler, processor and torch were not met before.

    Raises
    ------
    BuildError
        Without a compiler, or when it fails.
    """
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler was found; install g++ (or clang++) for the fast kernels")
    runtime = _openmp()
    target = cache_dir() / "kernels" / f"prehoc-{_key(compiler, runtime)}.so"
    if not target.exists():
        _compile(compiler, runtime, target)
    return ctypes.CDLL(str(target))


def _openmp() -> Path | None:
    """Return the OpenMP library that torch brought, so that both share one pool of threads (None: the compiler's)."""
    folder = Path(torch.__file__).parent / "lib"
    return next(iter(sorted(folder.glob("libgomp*.so*"))), None)


def _key(compiler: str, runtime: Path | None) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    cpu = provenance.cpuinfo("flags") or provenance.cpuinfo("Features") or provenance.cpu_name()
    sources = (path.read_text() for path in sorted(SOURCE.parent.glob("*.h")))
    parts = [SOURCE.read_text(), *sources, version, cpu, torch.__version__, str(runtime), *FLAGS]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


def _compile(compiler: str, runtime: Path | None, target: Path) -> None:
    """Compile into a temporary folder and move the result into place: an interrupted build leaves nothing behind."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made, built = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
        steps = [[compiler, *FLAGS, "-c", str(SOURCE), "-o", str(made)]]
        # linking torch's own file instead of -fopenmp keeps a second OpenMP out of the process
        steps.append([compiler, "-shared", str(made), "-o", str(built), str(runtime) if runtime else "-fopenmp"])
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True, check=False)
            if done.returncode:
                message = (done.stderr or done.stdout).strip().splitlines()[:3]
                raise BuildError(f"{Path(compiler).name} failed on the kernels: {' | '.join(message)}")
        os.replace(built, target)
