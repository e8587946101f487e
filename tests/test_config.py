"""Budgets, strict construction, and errors that name the value and the fix."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prehoc import config
from prehoc.config import Budget, check_choice, check_int, check_range, from_dict, unknown


@dataclasses.dataclass(frozen=True)
class Sample:
    name: ClassVar[str] = "sample"

    count: int = 1
    share: float = 0.5
    optional: int | None = None
    both: int | float = 0.5
    maybe: int | float | None = None
    flag: bool = False
    mode: Literal["one", "two"] = "one"
    parts: tuple[str, ...] = ("a", "b")


# --------------------------------------------------------------------------------------------------------------- budget


def test_a_total_under_48_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"budget=47 is too small: sink 8 \+ local 32 leave fewer than 8 .*at least 48"
    ):
        Budget(total=47)
    assert Budget(total=48).critical_for(10_000) == 8


def test_sizes() -> None:
    assert Budget(total=1024).critical_for(1) == Budget(total=1024).critical_for(10**6) == 984
    assert Budget(critical=100).critical_for(1) == 100
    assert Budget(ratio=1 / 8).critical_for(8192) == 1024 - 40
    assert Budget(ratio=1 / 8).critical_for(8199) == 1024 - 40
    assert Budget(ratio=1 / 8).critical_for(100) == 8  # never fewer than sinks, local keys and 8
    assert Budget(ratio=1 / 8).critical_for(0) == 8
    assert Budget(mass=0.9).critical_for(1000) is None
    assert Budget(mass=0.9, total=128).critical_for(1000) == 88
    assert Budget(mass=0.9, ratio=0.5).critical_for(1000) == 460


@given(st.integers(0, 100), st.integers(1, 100), st.integers(1, 100_000), st.floats(1e-4, 1.0))
def test_a_ratio_is_a_share_of_the_prompt(sink: int, local: int, prompt: int, ratio: float) -> None:
    critical = Budget(sink=sink, local=local, ratio=ratio).critical_for(prompt)
    assert critical is not None and critical >= 8
    total = sink + local + critical
    assert total <= max(ratio * prompt, sink + local + 8) and total > ratio * prompt - 1


def test_of_takes_an_eighth_when_nothing_is_said() -> None:
    assert Budget.of(None, None, None, None, 8, 32).ratio == 1 / 8
    assert Budget.of(None, None, None, None, 8, 32).critical_for(8192) == 1024 - 40
    assert Budget.of(None, None, None, None, 8, 32).critical_for(90) == 256 - 40  # a short prompt is covered
    assert Budget.of(None, 1 / 8, None, None, 8, 32).critical_for(90) == 8  # a stated ratio is kept
    assert Budget.of(None, None, None, 0.9, 8, 32).ratio is None
    assert Budget.of(64, None, None, None, 8, 32) == Budget(total=64)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"total": 128, "ratio": 0.5},
            "budget=128 and ratio=0.5 both set the size: give one of budget, ratio, critical",
        ),
        ({"total": 128, "critical": 9}, "budget=128 and critical=9 both set the size"),
        ({"ratio": 0.5, "critical": 9}, "ratio=0.5 and critical=9 both set the size"),
        ({"ratio": 0.0}, r"ratio=0.0 must lie in \(0.0, 1.0\]; 1/8 reads an eighth"),
        ({"ratio": 1.5}, r"ratio=1.5 must lie in \(0.0, 1.0\]"),
        ({"ratio": float("nan")}, "ratio=nan must lie in"),
        ({"mass": 1.01}, r"mass=1.01 must lie in \(0.0, 1.0\]; 0.98 keeps 98 %"),
        ({"mass": 0}, "mass=0 must lie in"),
        ({"mass": True}, "mass=True must be a number"),
        ({"total": 0}, "budget=0 must be at least 1"),
        ({"total": -5}, "budget=-5 must be at least 1"),
        ({"total": 128.0}, "budget=128.0 must be an integer"),
        ({"total": True}, "budget=True must be an integer"),
        ({"critical": 0}, "critical=0 must be at least 1"),
        ({"sink": -1, "total": 64}, "sink=-1 must be at least 0"),
        ({"local": 0, "total": 64}, "local=0 must be at least 1"),
        (
            {"sink": 100, "total": 128},
            r"budget=128 is too small: sink 100 \+ local 32 .* give at least 140, or a smaller sink",
        ),
        ({"ratio": "half"}, "ratio='half' must be a number"),
    ],
)
def test_contradictions_name_value_and_fix(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Budget(**keys)


def test_one_printed_form_with_tokens_and_ratio() -> None:
    assert (
        Budget(total=1024).describe(8192)
        == "1024 keys (8 sink + 984 critical + 32 local) = 0.125 of 8192 prompt tokens"
    )
    assert (
        Budget(ratio=0.25).describe(4096)
        == "1024 keys (8 sink + 984 critical + 32 local) = 0.250 of 4096 prompt tokens"
    )
    assert Budget(total=128).describe() == "128 keys (8 sink + 88 critical + 32 local)"
    assert Budget(ratio=0.25).describe() == "0.25 of the prompt (8 sink and 32 local included)"
    assert Budget(mass=0.98).describe(100) == "as few as retain mass 0.98"
    assert Budget(mass=0.98, total=128).describe().endswith("at most, as few as retain mass 0.98")
    for budget in (
        Budget(total=64),
        Budget(ratio=0.1),
        Budget(critical=4),
        Budget(mass=0.5),
        Budget(mass=0.5, ratio=0.1),
    ):
        for prompt in (None, 0, 1, 5000):
            assert budget.describe(prompt).strip()


# ------------------------------------------------------------------------------------------------------------ from_dict


def test_values_are_converted_from_text() -> None:
    text = {
        "count": "3",
        "share": "1/8",
        "optional": "none",
        "both": "4",
        "maybe": "0.25",
        "flag": "true",
        "mode": "two",
        "parts": "x+y",
    }
    assert from_dict(Sample, text) == Sample(3, 0.125, None, 4, 0.25, True, "two", ("x", "y"))
    assert isinstance(from_dict(Sample, {"both": "4"}).both, int)
    assert isinstance(from_dict(Sample, {"both": "0.5"}).both, float)
    assert isinstance(from_dict(Sample, {"both": "1.0"}).both, float)
    assert from_dict(Sample, {"optional": "7"}).optional == 7
    assert from_dict(Sample, {"flag": "no"}).flag is False
    assert from_dict(Sample, {"share": "1e-2"}).share == 0.01
    assert from_dict(Sample, {"count": 5, "parts": ("z",)}) == Sample(count=5, parts=("z",))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cuont": 1}, "unknown key 'cuont' for method 'sample'; did you mean 'count'"),
        ({"zzzzzz": 1}, r"unknown key 'zzzzzz' for method 'sample' \(known: both, count, flag"),
        ({"name": "x"}, "unknown key 'name'"),
        ({"count": "many"}, "count='many' is not a valid value: expected int"),
        ({"count": "1.5"}, "count='1.5' is not a valid value: expected int"),
        ({"count": "none"}, "count='none' is not a valid value: expected int"),
        ({"share": "1/0"}, "share='1/0' is not a valid value: expected float"),
        ({"share": "half"}, "share='half' is not a valid value: expected float"),
        ({"flag": "perhaps"}, "flag='perhaps' is not a valid value: expected bool"),
        ({"optional": "x"}, "optional='x' is not a valid value: expected int or None"),
    ],
)
def test_bad_keys_and_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_dict(Sample, values)


# --------------------------------------------------------------------------------------------------------------- checks


def test_unknown_offers_the_nearest_name() -> None:
    assert "did you mean 'stream'" in str(unknown("method", "straem", ["stream", "dense"]))
    text = str(unknown("method", "xyz", ["stream", "dense"], " here"))
    assert "did you mean" not in text and "unknown method 'xyz' here (known: dense, stream)" in text


def test_check_int() -> None:
    check_int("a", 3, 3)
    check_int("a", None, 3, optional=True)
    for value, message in (
        (2, "a=2 must be at least 3"),
        (None, "a=None must be an integer"),
        ("3", "a='3' must be an integer"),
    ):
        with pytest.raises(ValueError, match=message):
            check_int("a", value, 3)


def test_check_range() -> None:
    check_range("a", 0, 0, 1)
    check_range("a", 1.0, 0, 1, open_low=True)
    for value in (0, -0.1, 1.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"a=.* must lie in \(0, 1\]; do this"):
            check_range("a", value, 0, 1, open_low=True, fix="do this")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_check_range_wants_a_finite_number(value: float) -> None:
    with pytest.raises(ValueError, match="a="):
        check_range("a", value, 0.0, float("inf"))


def test_check_choice() -> None:
    check_choice("a", "one", ("one", "two"))
    with pytest.raises(ValueError, match=r"unknown a 'onne'; did you mean 'one'\? \(known: one, two\)"):
        check_choice("a", "onne", ("one", "two"))
    with pytest.raises(ValueError, match="unknown a '3'"):
        check_choice("a", 3, ("one", "two"))


# ---------------------------------------------------------------------------------------------------------- environment


def test_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PREHOC_CACHE", "XDG_CACHE_HOME", "PREHOC_DATA", "PREHOC_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config.cache_dir() == tmp_path / ".cache" / "prehoc"
    assert config.data_dir() is None and config.default_backend() == "auto"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert config.cache_dir() == tmp_path / "xdg" / "prehoc"
    monkeypatch.setenv("PREHOC_CACHE", "~/own")
    monkeypatch.setenv("PREHOC_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PREHOC_BACKEND", "reference")
    assert config.cache_dir() == tmp_path / "own"
    assert config.data_dir() == tmp_path / "data" and config.default_backend() == "reference"
