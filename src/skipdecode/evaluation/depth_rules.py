"""Baselines with another rule for the depth of each step: Unified Layer Skipping, D3 and HSD."""

from __future__ import annotations

from collections.abc import Sequence

from ..latency.fitting import bisect_ratio
from ..schedule import Schedule, flat_depth
from .methods_base import Method


class Unified(Method):
    """Unified Layer Skipping (arXiv 2404.06954): a constant depth, set by the target alone, of evenly spread layers.

    A lower depth runs a subset of a higher depth's layers (order ``even``), so that one cache serves all depths.
    """

    name = "unified"
    label = "Unified Layer Skipping"

    def schedule(self, num_layers: int, speedup: float, lengths: Sequence[int]) -> Schedule:
        """Return the schedule with ``L / speedup`` layers, rounded, at every step, whatever the lengths."""
        depth = flat_depth(speedup, num_layers)
        return Schedule(num_layers, depth, depth, horizon=1, decay="constant", order="even")


class D3(Method):
    """Position-aware depth decay decoding (arXiv 2503.08524): step i runs ``floor(L * alpha ** i)`` layers.

    The paper needs no training. First and last layers always run: the skipped block in the middle grows.
    """

    name = "d3"
    label = "D3"

    def schedule(self, num_layers: int, speedup: float, lengths: Sequence[int]) -> Schedule:
        """Return the schedule whose layer ratio over ``lengths`` is nearest to ``speedup``, by bisecting ``alpha``."""
        if speedup == 1:
            return Schedule.full(num_layers)
        ends = [layer for pair in zip(range(num_layers), reversed(range(num_layers)), strict=True) for layer in pair]
        order = tuple(dict.fromkeys(ends))
        least = min(2, num_layers)

        def at(fall: float) -> Schedule:
            depths = [max(int(num_layers * (1 - fall) ** i + 1e-9), least) for i in range(max(lengths) + 1)]
            return Schedule.from_depths(num_layers, depths, order=order)

        return bisect_ratio(at, 0.0, 1.0, speedup, lengths)


class HSD(Method):
    """Hierarchical skip decoding (arXiv 2403.14919): the longer the text, the more layers are skipped, level by level.

    The paper needs no training. Every level halves the depth and spreads the remaining layers evenly over the model.
    Not from the paper: all levels last equally many tokens, as many as the target allows.
    """

    name = "hsd"
    label = "HSD"

    def schedule(self, num_layers: int, speedup: float, lengths: Sequence[int]) -> Schedule:
        """Return the schedule whose layer ratio over ``lengths`` is nearest to ``speedup``, by tokens per level."""
        if speedup == 1:
            return Schedule.full(num_layers)
        least = min(2, num_layers)

        def at(fall: float) -> Schedule:
            span = (1 - fall) * 2 * max(lengths)
            levels = [int(step / span) if span > 0 else 60 for step in range(max(lengths) + 1)]
            depths = [max(-(-num_layers // 2 ** min(level, 60)), least) for level in levels]
            return Schedule.from_depths(num_layers, depths, order="even")

        return bisect_ratio(at, 0.0, 1.0, speedup, lengths)
