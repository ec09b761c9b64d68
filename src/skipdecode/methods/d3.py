"""D3, position-aware depth decay decoding (arXiv 2503.08524): step i keeps ``floor(L * alpha ** i)`` layers."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.schedule import Schedule
from ..planning.fitting import bisect_ratio
from .base import Method


class D3(Method):
    """Training-free in its paper. First and last layers are kept: the skipped block in the middle grows."""

    name = "d3"
    label = "D3"

    def schedule(self, num_layers: int, speedup: float, lengths: Sequence[int]) -> Schedule:
        """``alpha`` found by bisection; never fewer layers than the first and the last."""
        if speedup == 1:
            return Schedule.full(num_layers)
        ends = [layer for pair in zip(range(num_layers), reversed(range(num_layers)), strict=True) for layer in pair]
        order = tuple(dict.fromkeys(ends))
        least = min(2, num_layers)

        def at(fall: float) -> Schedule:
            depths = [max(int(num_layers * (1 - fall) ** i + 1e-9), least) for i in range(max(lengths) + 1)]
            return Schedule.from_depths(num_layers, depths, order=order)

        return bisect_ratio(at, 0.0, 1.0, speedup, lengths)
