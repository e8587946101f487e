"""Building the C++ kernels: once, into the cache, with torch's own threads; without a compiler nothing breaks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from prehoc import kernels
from prehoc.kernels.cpu import build


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Give the test an empty cache and no memory of earlier builds, and forget its own afterwards."""
    memories = (build.library, kernels._cpu_fails, kernels._runs_or_warning)
    monkeypatch.setenv("PREHOC_CACHE", str(tmp_path))
    for memory in memories:
        memory.cache_clear()
    yield tmp_path
    for memory in memories:
        memory.cache_clear()


def test_built_once_into_the_cache(fresh: Path) -> None:
    build.library()
    (made,) = (fresh / "kernels").glob("*.so")
    stamp = made.stat().st_mtime_ns
    build.library.cache_clear()
    build.library()
    assert made.stat().st_mtime_ns == stamp
    assert [path.name for path in (fresh / "kernels").iterdir()] == [made.name]


def test_no_compiler_falls_back_and_says_so_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.warns(RuntimeWarning, match=r"slow torch kernels: no C\+\+ compiler was found; install g\+\+"):
        assert kernels.resolve("auto", torch.device("cpu")) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.resolve("auto", torch.device("cpu")) == "reference"
    with pytest.raises(ValueError, match="backend 'cpu' cannot run here: no C"):
        kernels.resolve("cpu", torch.device("cpu"))


def test_a_failing_compiler_is_quoted_and_leaves_nothing(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-fno-such-flag"))
    with pytest.raises(build.BuildError, match="no-such-flag"):
        build.library()
    assert list((fresh / "kernels").iterdir()) == []


def test_unknown_backend_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'reference'"):
        kernels.resolve("refrence", torch.device("cpu"))
    with pytest.raises(ValueError, match="cannot run on cuda"):
        kernels.resolve("cpu", torch.device("cuda"))


def test_one_pool_of_threads() -> None:
    threads = torch.get_num_threads()
    try:
        for wanted in (1, 2):
            torch.set_num_threads(wanted)
            assert build.library().prehoc_threads() == wanted
    finally:
        torch.set_num_threads(threads)
    mapped = {Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if "gomp" in line}
    ours = {
        path for path in mapped if not path.parent.name.endswith(".libs")
    }  # a wheel's private copy serves only itself
    assert len(ours) == 1, f"two OpenMP runtimes in one process: {ours}"
