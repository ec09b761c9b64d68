"""HSD, hierarchical skip decoding (arXiv 2403.14919): the longer the text, the more levels of layers are skipped."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.schedule import Schedule
from ..planning.fitting import bisect_ratio
from .base import Method


class HSD(Method):
    """Plug-and-play in its paper. Every level halves the depth, and what is left is spread evenly over the model.

    The lengths at which levels change are ours: equal spans, as long as the target allows.
    """

    name = "hsd"
    label = "HSD"

    def schedule(self, num_layers: int, speedup: float, lengths: Sequence[int]) -> Schedule:
        """The span of a level, in tokens, found by bisection; never fewer layers than the first and the last."""
        if speedup == 1:
            return Schedule.full(num_layers)
        least = min(2, num_layers)

        def at(fall: float) -> Schedule:
            span = (1 - fall) * 2 * max(lengths)
            levels = [int(step / span) if span > 0 else 60 for step in range(max(lengths) + 1)]
            depths = [max(-(-num_layers // 2 ** min(level, 60)), least) for level in levels]
            return Schedule.from_depths(num_layers, depths, order="even")

        return bisect_ratio(at, 0.0, 1.0, speedup, lengths)
