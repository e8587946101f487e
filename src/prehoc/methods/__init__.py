"""The methods by name, and the one reader of ``name:key=value,key=value``."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

from prehoc.config import from_dict, unknown
from prehoc.methods._eviction import Evictor
from prehoc.methods.auto import Auto
from prehoc.methods.cis import CIS
from prehoc.methods.cpe import CPE
from prehoc.methods.dense import Dense
from prehoc.methods.double_sparsity import DoubleSparsity
from prehoc.methods.etf import ETF
from prehoc.methods.h2o import H2O
from prehoc.methods.hshare import HShare
from prehoc.methods.oracle import Oracle
from prehoc.methods.psaw import PSAW
from prehoc.methods.quest import Quest
from prehoc.methods.random_expansion import RandomExpansion
from prehoc.methods.snapkv import SnapKV
from prehoc.methods.streaming import Streaming
from prehoc.methods.windows import LinearWindow, StaticWindow
from prehoc.selection import Method

METHODS: dict[str, type[Any]] = {
    m.name: m
    for m in (
        Dense,
        Streaming,
        Oracle,
        CIS,
        PSAW,
        ETF,
        CPE,
        Auto,
        Quest,
        DoubleSparsity,
        H2O,
        SnapKV,
        HShare,
        RandomExpansion,
        StaticWindow,
        LinearWindow,
    )
}

# the paper's own readings: one set per query head, block refresh, a sliding local window, its published schedule
_PAPER = {"granularity": "query_head", "refresh": "block", "local_window": "sliding", "tau": 0.8, "block_size": 8}
# what is named after the paper's tables, and its controls, has its gate; the bare `cis` and `cpe` have ours
_QUERY = {"gate": "query"}

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "cis-8": ("cis", {"block_size": 8, **_QUERY}),
    "cis-16": ("cis", {"block_size": 16, **_QUERY}),
    "cis-star": ("cis", {"matched": True, **_QUERY}),
    "cis_hidden": ("cis", {"gate": "hidden"}),
    "cis_key": ("cis", {"gate": "key"}),
    "cpe-8": ("cpe", {"block_size": 8, **_QUERY}),
    "cpe-16": ("cpe", {"block_size": 16, **_QUERY}),
    "direct_reuse": ("cis", {"dilate": 0, "radius": 0, **_QUERY}),
    # layers x heads x queries = 28.1 % and 12.5 %; HShare-0 is not defined where it is used: taken to be HShare-2
    "hshare-0": ("hshare", {"layers": 1 / 2, "heads": 1 / 2, "queries": 1 / 2}),
    "hshare-1": ("hshare", {"layers": 3 / 4, "heads": 3 / 4, "queries": 1 / 2}),
    "hshare-2": ("hshare", {"layers": 1 / 2, "heads": 1 / 2, "queries": 1 / 2}),
    "hshare_matched": ("hshare", {"layers": 2 / 5, "heads": 1 / 2, "queries": 1 / 2}),  # 10 %
    "oracle_topp": ("oracle", {"mass": 0.95, "sink": 0, "local": 1, "granularity": "query_head"}),
    "paper": (
        "cpe",
        {**_PAPER, **_QUERY, "phi": 0.7, "alpha": 1.5, "psi": 0.5, "gamma": 1.0, "start_layer": 0.5},
    ),
}


def parse_method(text: str, extra: Mapping[str, Any] | None = None) -> Method:
    """Return the method for ``name`` or ``name:key=value,key=value`` with the keys of `extra` added.

    Parameters
    ----------
    text : str
        A method or preset name with optional keys, such as ``cis:budget=1024,tau=0.8``.
    extra : mapping, optional
        More keys, as from ``--budget`` or ``--set``; like those of the text they win over a preset's.

    Returns
    -------
    Method

    Raises
    ------
    ValueError
        For an unknown method or key (with the nearest known one), a key given twice, a value out of range, or a malformed
        pair.
    TypeError
        For what is not a text.
    """
    if not isinstance(text, str):
        raise TypeError(f"parse_method reads a text such as 'cis:budget=1024'; {text!r} needs no reading")
    name, _, pairs = text.partition(":")
    name = name.strip().lower()
    values: dict[str, Any] = {}
    if name in PRESETS:
        name, preset = PRESETS[name]
        values.update(preset)
    if name not in METHODS:
        raise unknown("method", name, [*METHODS, *PRESETS])
    stated, added = parse_pairs(pairs.split(",") if pairs.strip() else []), extra or {}
    for key in stated:
        if key in added:
            raise ValueError(
                f"{key} is given twice: {key}={stated[key]} in {text.strip()!r} and {key}={added[key]} beside it; give "
                "one of them"
            )
    values.update(stated)
    values.update(added)
    method: Method = from_dict(METHODS[name], values)
    return method


def parse_pairs(pairs: list[str]) -> dict[str, str]:
    """Return ``key=value`` texts as a mapping.

    Raises
    ------
    ValueError
        For a text that is not ``key=value``, or a key that is given twice.
    """
    values: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{pair!r} is not key=value; write for example budget=1024")
        key, value = key.strip(), value.strip()
        if key in values:
            raise ValueError(f"{key} is given twice: {key}={values[key]} and {key}={value}; give one of them")
        values[key] = value
    return values


def prefill_key(method: Method) -> Hashable:
    """Return what decides a method's prefill: methods with equal keys can decode from copies of one cache.

    Methods that watch the prompt to evict keys share one with those that see the same in it; one that decides by the prompt's
    length whether to prune it has a prefill of its own.
    """
    plan = dataclasses.replace(method.plan(), selector=None)
    return plan, method.sees() if isinstance(method, Evictor) else method if isinstance(method, Auto) else None


def every_key(method: Method) -> dict[str, Any]:
    """Return a method's name and all of its keys: what a result belongs to, because a change of defaults makes another method."""
    return {"name": method.name, **dataclasses.asdict(method)}  # type: ignore[call-overload]


def describe(method: Method) -> str:
    """Return the method as ``name:key=value``, only what differs from its defaults."""
    pairs = [
        f"{f.name}={'+'.join(v) if isinstance(v, tuple) else v}"
        for f in dataclasses.fields(method)  # type: ignore[arg-type]
        if (v := getattr(method, f.name)) != f.default
    ]
    return method.name + (":" + ",".join(pairs) if pairs else "")


__all__ = [
    "Auto",
    "CIS",
    "CPE",
    "ETF",
    "H2O",
    "HShare",
    "LinearWindow",
    "METHODS",
    "PRESETS",
    "PSAW",
    "Dense",
    "DoubleSparsity",
    "Oracle",
    "Quest",
    "RandomExpansion",
    "SnapKV",
    "StaticWindow",
    "Streaming",
    "describe",
    "every_key",
    "parse_method",
    "parse_pairs",
    "prefill_key",
]
