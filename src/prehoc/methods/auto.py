"""auto: CPE where this machine was measured to gain from it, dense attention for shorter prompts."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from prehoc.methods.cpe import CPE


@dataclasses.dataclass(frozen=True)
class Auto(CPE):
    """CPE for prompts from the measured break-even length on, dense below; every key of `CPE` is a key of it.

    The engine looks the break-even up when it attaches (``prehoc bench break-even`` measures it). Without one it stays dense,
    and says so.
    """

    name: ClassVar[str] = "auto"

    def method(self) -> CPE:
        """Return the method that is used where it pays: the one to measure."""
        keys: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(CPE)}
        return CPE(**keys)
