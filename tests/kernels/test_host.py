"""Large pages: advice that never changes a value, and that Linux takes where it may."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from prehoc.kernels.host import advise_large_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("size", [0, 1, 2**18, 2**21 + 3, 2**23])
def test_the_tensor_stays_usable(size: int) -> None:
    x = torch.full((size,), 7, dtype=torch.uint8)
    advise_large_pages(x)
    assert bool((x == 7).all())
    x.fill_(9)
    assert x.sum(dtype=torch.int64).item() == 9 * size


@pytest.mark.skipif(not SETTING.exists() or "[never]" in SETTING.read_text(), reason="no transparent large pages here")
def test_linux_backs_it_with_large_pages() -> None:
    x = torch.empty(2**26, dtype=torch.uint8)  # fresh memory, larger than what an allocator keeps
    advise_large_pages(x)
    x.fill_(1)
    address = x.data_ptr() + x.nbytes // 2
    current, flags = False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            current = int(span[1], 16) <= address < int(span[2], 16)
        elif current and line.startswith("VmFlags"):
            flags = line
    assert " hg" in flags, "the advice did not reach the kernel"


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("ctypes.CDLL", lambda name: pytest.fail("called madvise where there is none"))
    advise_large_pages(torch.empty(2**23, dtype=torch.uint8))
