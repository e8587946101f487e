"""prehoc: choose the few keys worth reading before scoring them, read only those, and say how much was left out."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prehoc.integrations.transformers import Session, attach, detach, fork, new_cache, sparsify, supports
    from prehoc.methods import (
        CIS,
        CPE,
        ETF,
        H2O,
        PSAW,
        Auto,
        Dense,
        DoubleSparsity,
        HShare,
        LinearWindow,
        Oracle,
        Quest,
        RandomExpansion,
        SnapKV,
        StaticWindow,
        Streaming,
        parse_method,
    )
    from prehoc.packing import packed
    from prehoc.report import Report

__version__ = "0.1.0"

_METHODS = (
    "Auto",
    "CIS",
    "CPE",
    "Dense",
    "DoubleSparsity",
    "ETF",
    "H2O",
    "HShare",
    "LinearWindow",
    "Oracle",
    "PSAW",
    "Quest",
    "RandomExpansion",
    "SnapKV",
    "StaticWindow",
    "Streaming",
    "parse_method",
)
_ENGINE = ("Session", "attach", "detach", "fork", "new_cache", "sparsify", "supports")
_HOME = {
    **dict.fromkeys(_METHODS, "prehoc.methods"),
    **dict.fromkeys(_ENGINE, "prehoc.integrations.transformers"),
    "Report": "prehoc.report",
    "packed": "prehoc.packing",
}

__all__ = [
    "Auto",
    "CIS",
    "CPE",
    "Dense",
    "DoubleSparsity",
    "ETF",
    "H2O",
    "HShare",
    "LinearWindow",
    "Oracle",
    "PSAW",
    "Quest",
    "RandomExpansion",
    "Report",
    "Session",
    "SnapKV",
    "StaticWindow",
    "Streaming",
    "__version__",
    "attach",
    "detach",
    "fork",
    "new_cache",
    "packed",
    "parse_method",
    "sparsify",
    "supports",
]


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    """Import a public name on first use: ``prehoc --help`` need not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'prehoc' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
