"""What a file says of where it was measured."""

import pytest

from prehoc import provenance


@pytest.mark.parametrize(
    ("found", "name"),
    [
        ({"model name": "AMD EPYC", "flags": "fpu avx avx2"}, "AMD EPYC with AVX2"),
        ({"model name": "AMD EPYC", "flags": "fpu avx2 avx512f"}, "AMD EPYC with AVX-512"),
        ({"model name": "Neoverse", "Features": "fp asimd"}, "Neoverse with NEON"),
        ({"model name": "old", "flags": "fpu sse2"}, "old"),
    ],
)
def test_processors_of_one_name_are_told_apart(
    found: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "cpuinfo", found.get)
    assert provenance.cpu_name() == name
