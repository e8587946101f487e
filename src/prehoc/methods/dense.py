"""Dense attention: every visible key is read at every step."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from prehoc.selection import Plan


@dataclasses.dataclass(frozen=True)
class Dense:
    """Read every visible key: the baseline beside every number."""

    name: ClassVar[str] = "dense"

    def plan(self) -> Plan:
        """Return the empty plan."""
        return Plan()
