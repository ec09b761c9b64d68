"""The stock model: every layer, every token."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.schedule import Schedule
from .base import Method


class Full(Method):
    """All layers at every step, whatever the target."""

    name = "full"
    label = "full model"
    skips = False
    fits_depths = False
    is_reference = True

    def is_trained_by(self, name: str) -> bool:
        """It needs no training."""
        return True

    def schedule(self, num_layers: int, speedup: float, lengths: Sequence[int]) -> Schedule:
        """The full schedule."""
        return Schedule.full(num_layers)
