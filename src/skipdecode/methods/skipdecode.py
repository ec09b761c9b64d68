"""SkipDecode (Del Corro et al., 2023): depth falls with the position, lower and middle layers go first."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.fitting import fit
from ..core.schedule import Schedule
from .base import Method


class SkipDecode(Method):
    """Linear decay, order ``top``, depths and horizon fitted to the lengths that are really written."""

    name = "skipdecode"
    label = "SkipDecode"

    def schedule(self, num_layers: int, speedup: float, lengths: Sequence[int]) -> Schedule:
        """See :func:`skipdecode.core.fitting.fit`."""
        return fit(num_layers, speedup, lengths)
