"""What a session counts."""

from __future__ import annotations

import torch

from prehoc.books import Books


class Elsewhere:
    """A mass on another device, which no tensor function may meet before it is fetched."""

    def __init__(self, mass: float) -> None:
        self._mass = mass

    def cpu(self) -> torch.Tensor:
        return torch.tensor(self._mass)


def test_audits_of_layers_on_several_devices_are_gathered() -> None:
    books = Books()
    assert books.audited().shape == (0,)
    for row, mass in ((0, torch.tensor(0.5)), (2, Elsewhere(0.75))):
        books.audit(row, mass)  # type: ignore[arg-type]
    assert books.audited().tolist() == [0.5, 0.75] and books.audited_rows == [0, 2]
