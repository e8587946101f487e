"""Configuration helpers: the budget, strict construction from mappings, and the only reader of the environment."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

DEFAULT_SINK = 8
DEFAULT_LOCAL = 32
DEFAULT_RATIO = 1 / 8
DEFAULT_LEAST = 256


def cache_dir() -> Path:
    """Return the folder for pulled models and compiled kernels (``PREHOC_CACHE``, else the user's cache folder)."""
    if explicit := os.environ.get("PREHOC_CACHE"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "prehoc"


def data_dir() -> Path | None:
    """Return the folder with evaluation data (``PREHOC_DATA``), or None when the variable is unset."""
    explicit = os.environ.get("PREHOC_DATA")
    return Path(explicit).expanduser() if explicit else None


def default_backend() -> str:
    """Return the kernel backend asked for by ``PREHOC_BACKEND`` (``auto`` when unset)."""
    return os.environ.get("PREHOC_BACKEND", "auto")


def unknown(kind: str, name: str, known: Iterable[str], where: str = "") -> ValueError:
    """Build the error for an unknown name, with the nearest known name and the full list."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {name!r}{where}{hint} (known: {', '.join(names)})")


def from_dict(cls: type[T], values: Mapping[str, Any]) -> T:
    """Build the frozen dataclass `cls` from a mapping; strings are converted to the field's type.

    Parameters
    ----------
    cls : type
        A dataclass whose fields are ``int``, ``float``, ``bool``, ``str``, optional forms of these, or tuples of ``str``.
    values : mapping
        Field name to value; a string value such as ``"1/8"`` or ``"none"`` is parsed.

    Returns
    -------
    cls
        The validated configuration.

    Raises
    ------
    ValueError
        For an unknown key (with the nearest known one) or a value of the wrong type.
    """
    fields = {f.name for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    for key in values:
        if not fields:
            raise ValueError(f"method {getattr(cls, 'name', cls.__name__)!r} takes no keys, but {key} was given")
        if key not in fields:
            raise unknown("key", key, fields, f" for method {getattr(cls, 'name', cls.__name__)!r}")
    return cls(**{key: _convert(value, hints[key], key) for key, value in values.items()})


def _convert(value: Any, kind: Any, key: str) -> Any:
    if not isinstance(value, str):
        return value
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    text = value.strip()
    if type(None) in options and text.lower() in ("none", "null", ""):
        return None
    for option in options:
        try:
            if option is bool:
                return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
            if option is int:
                return int(text)
            if option is float:
                return _number(text)
            if option is str or typing.get_origin(option) is typing.Literal:
                return text
            if typing.get_origin(option) is tuple:
                return tuple(part for part in text.split("+") if part)
        except (KeyError, ValueError, ZeroDivisionError):
            continue
    expected = " or ".join(getattr(option, "__name__", str(option)) for option in options)
    raise ValueError(f"{key}={value!r} is not a valid value: expected {expected}")


def _number(text: str) -> float:
    numerator, slash, denominator = text.partition("/")
    return float(numerator) / float(denominator) if slash else float(text)


def check_int(key: str, value: Any, low: int, optional: bool = False) -> None:
    """Raise ValueError unless `value` is an integer of at least `low` (or None when `optional`)."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key}={value!r} must be an integer")
    if value < low:
        raise ValueError(f"{key}={value} must be at least {low}")


def check_bool(key: str, value: Any) -> None:
    """Raise ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{key}={value!r} must be true or false")


def check_range(key: str, value: Any, low: float, high: float, open_low: bool = False, fix: str = "") -> None:
    """Raise ValueError unless `value` is a finite number in [low, high] (or (low, high] when `open_low`)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{key}={value!r} must be a number")
    if not (low < value if open_low else low <= value) or not value <= high or math.isinf(value):
        bracket = "(" if open_low else "["
        raise ValueError(f"{key}={value} must lie in {bracket}{low}, {high}]{'; ' + fix if fix else ''}")


def check_choice(key: str, value: Any, known: tuple[str, ...]) -> None:
    """Raise ValueError (with the nearest known name) unless `value` is one of `known`."""
    if value not in known:
        raise unknown(key, str(value), known)


@dataclasses.dataclass(frozen=True)
class Budget:
    """How many keys one selection head may read: sinks + critical + local.

    Exactly one of `total`, `ratio`, `critical` sets the size; `mass` alone or with one of them makes the size follow the
    attention mass, with the size as its cap. Counts are keys per selection head (design decision 4).

    Parameters
    ----------
    sink, local : int
        First and last keys that are always read.
    total : int, optional
        All keys together: ``critical = total - sink - local``.
    ratio : float, optional
        Share of the row's real prompt length, fixed at the end of prefill; never fewer than `sink` + `local` + `floor` keys.
    critical : int, optional
        The number of retrieved keys itself.
    mass : float, optional
        Attention mass to retain at each anchor, in (0, 1].
    floor : int
        The least number of critical keys of a total or ratio.

    Raises
    ------
    ValueError
        When the sizes contradict each other or are too small.
    """

    sink: int = DEFAULT_SINK
    local: int = DEFAULT_LOCAL
    total: int | None = None
    ratio: float | None = None
    critical: int | None = None
    mass: float | None = None
    floor: int = 8

    def __post_init__(self) -> None:
        check_int("sink", self.sink, 0)
        check_int("local", self.local, 1)
        check_int("budget", self.total, 1, optional=True)
        check_int("critical", self.critical, 1, optional=True)
        given = [
            f"{key}={value}"
            for key, value in (("budget", self.total), ("ratio", self.ratio), ("critical", self.critical))
            if value is not None
        ]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} both set the size: give one of budget, ratio, critical")
        if self.ratio is not None:
            check_range("ratio", self.ratio, 0.0, 1.0, open_low=True, fix="1/8 reads an eighth of the prompt")
        if self.mass is not None:
            check_range("mass", self.mass, 0.0, 1.0, open_low=True, fix="0.98 keeps 98 % of the attention mass")
        least = self.sink + self.local + self.floor
        if self.total is not None and self.total < least:
            raise ValueError(
                f"budget={self.total} is too small: sink {self.sink} + local {self.local} leave fewer than {self.floor} "
                f"critical keys; give at least {least}, or a smaller sink or local"
            )

    @classmethod
    def of(
        cls,
        budget: int | None,
        ratio: float | None,
        critical: int | None,
        mass: float | None,
        sink: int,
        local: int,
    ) -> Budget:
        """Return the budget for a method's keys; with none of the first four, an eighth of the prompt, 256 keys at least."""
        if budget is None and ratio is None and critical is None and mass is None:
            # an eighth of a short prompt breaks answers, and saves nothing: such prompts are covered, hence dense
            floor = max(DEFAULT_LEAST - sink - local, cls.floor)
            return cls(sink=sink, local=local, ratio=DEFAULT_RATIO, floor=floor)
        return cls(sink=sink, local=local, total=budget, ratio=ratio, critical=critical, mass=mass)

    def critical_for(self, prompt_tokens: int) -> int | None:
        """Return the critical keys of a row with this many real prompt tokens (None: only the mass limits it)."""
        if self.critical is not None:
            return self.critical
        if self.total is not None:
            return self.total - self.sink - self.local
        if self.ratio is not None:
            return max(int(self.ratio * prompt_tokens) - self.sink - self.local, self.floor)
        return None

    def describe(self, prompt_tokens: int | None = None) -> str:
        """Return the one printed form, with tokens and ratio: keys and their parts, and their share of the prompt."""
        parts = []
        critical = self.critical_for(prompt_tokens or 0) if prompt_tokens or self.ratio is None else None
        if critical is not None:
            total = self.sink + critical + self.local
            parts.append(f"{total} keys ({self.sink} sink + {critical} critical + {self.local} local)")
            if prompt_tokens and total >= prompt_tokens:
                parts.append(f", which covers the prompt of {prompt_tokens} tokens")
            elif prompt_tokens:
                parts.append(f"= {total / prompt_tokens:.3f} of {prompt_tokens} prompt tokens")
        elif self.ratio is not None:
            parts.append(f"{self.ratio:.4g} of the prompt ({self.sink} sink and {self.local} local included)")
        if self.mass is not None:
            parts.append(f"{'at most, ' if parts else ''}as few as retain mass {self.mass:g}")
        return " ".join(parts).replace(" ,", ",")
