"""The C++ kernels without torch under AddressSanitizer and UBSan, and compiled for processors without AVX-512."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from prehoc import provenance
from prehoc.kernels.cpu import build

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler was found")
ROUNDS = "12"


CHECKS = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
AVX2 = ("-mavx2", "-mfma", "-mf16c")  # compiles much faster than AVX-512


@pytest.mark.parametrize(
    ("flags", "needs"),
    [
        pytest.param((*CHECKS, *AVX2, "-DONLY=bf16"), "avx2", id="sanitized avx2"),
        pytest.param((*CHECKS, "-march=native"), "", id="sanitized, all types", marks=pytest.mark.slow),
        pytest.param(("-O1", *AVX2), "avx2", id="avx2, all types", marks=pytest.mark.slow),
    ],
)
def test_fuzz(flags: tuple[str, ...], needs: str, tmp_path: Path) -> None:
    if needs not in (provenance.cpuinfo("flags") or ""):
        pytest.skip(f"this processor has no {needs}")
    source, program = Path(__file__).with_name("fuzz") / "fuzz.cpp", tmp_path / "fuzz"
    options = ("-g0", "-std=c++17", "-fno-math-errno", "-fopenmp", f"-I{build.SOURCE.parent}")
    built = subprocess.run(
        [str(COMPILER), *options, *flags, str(source), "-o", str(program)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr[-2000:]
    # the OpenMP runtime keeps its threads to the end: they are not leaks
    environment = {"OMP_NUM_THREADS": "2", "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([str(program), "1", ROUNDS], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0 and done.stdout == "no fault\n", done.stdout + done.stderr[-3000:]
