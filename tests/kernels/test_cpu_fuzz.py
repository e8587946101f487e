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


SANITIZED = ("-O0", "-march=native", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
AVX2 = ("-O1", "-mavx2", "-mfma", "-mf16c")


@pytest.mark.parametrize(
    ("flags", "needs"),
    [
        pytest.param((*SANITIZED, "-DONLY=bf16"), "", id="sanitized"),
        pytest.param((*AVX2, "-DONLY=fp16"), "avx2", id="avx2"),
        pytest.param(SANITIZED, "", id="sanitized, all types", marks=pytest.mark.slow),
        pytest.param(AVX2, "avx2", id="avx2, all types", marks=pytest.mark.slow),
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
