"""CPE: CIS over time, PSAW over depth and ETF over layers, in any combination."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from prehoc.config import check_choice
from prehoc.methods.cis import CIS
from prehoc.methods.etf import ETF
from prehoc.methods.psaw import PSAW
from prehoc.selection import Plan

PARTS = ("cis", "psaw", "etf")
PSAW_START = 0.83
"""Default l_s of PSAW inside CPE: with ETF's loss beside it, its own 0.75 exceeds the limit (docs/methods/psaw.md)."""


@dataclasses.dataclass(frozen=True)
class CPE(CIS):
    """The three selectors together; every key of CIS, PSAW and ETF is a key of CPE.

    Parameters
    ----------
    phi, alpha, psi, gamma, kv
        As in `PSAW` and `ETF`.
    start_layer : float or int, optional
        l_s of PSAW and ETF together; the two below win over it.
    psaw_start_layer, etf_start_layer : float or int, optional
        l_s of each alone (None: `start_layer`, else 0.83 for PSAW and the default of `ETF`).
    parts : tuple of {"cis", "psaw", "etf"}
        The selectors to use; ``parts=psaw+etf`` in a method string.

    Raises
    ------
    ValueError
        When a value lies outside its range.
    """

    name: ClassVar[str] = "cpe"

    phi: float = PSAW.phi
    alpha: float = PSAW.alpha
    psi: float = ETF.psi
    gamma: float = ETF.gamma
    start_layer: int | float | None = None
    psaw_start_layer: int | float | None = None
    etf_start_layer: int | float | None = None
    kv: Literal["project", "share"] = "project"
    parts: tuple[str, ...] = PARTS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.parts:
            raise ValueError("parts=() selects nothing; give one or more of cis, psaw, etf, or use method dense")
        for part in self.parts:
            check_choice("parts", part, PARTS)
        self.psaw()
        self.etf()

    def psaw(self) -> PSAW:
        """Return the depth window (its `sink` and `local` are those of CIS)."""
        start = self._first(self.psaw_start_layer, self.start_layer, PSAW_START)
        return PSAW(phi=self.phi, alpha=self.alpha, start_layer=start, sink=self.sink, local=self.local)

    def etf(self) -> ETF:
        """Return the token freezing."""
        start = self._first(self.etf_start_layer, self.start_layer, ETF.start_layer)
        return ETF(psi=self.psi, gamma=self.gamma, start_layer=start, kv=self.kv)

    @staticmethod
    def _first(own: float | int | None, both: float | int | None, default: float | int) -> float | int:
        return next(value for value in (own, both, default) if value is not None)

    def plan(self) -> Plan:
        """Return a plan with the chosen parts."""
        return Plan(
            selector=super().plan().selector if "cis" in self.parts else None,
            window=self.psaw() if "psaw" in self.parts else None,
            freeze=self.etf() if "etf" in self.parts else None,
        )
