"""Unified Layer Skipping (arXiv 2404.06954): a constant depth that the target alone decides, layers evenly spread."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.decays import flat_depth
from ..core.schedule import Schedule
from .base import Method


class Unified(Method):
    """The paper's rule, with its layers made nested (order ``even``) so that one cache serves them."""

    name = "unified"
    label = "Unified Layer Skipping"

    def schedule(self, num_layers: int, speedup: float, lengths: Sequence[int]) -> Schedule:
        """``L / speedup`` layers at every step."""
        depth = flat_depth(speedup, num_layers)
        return Schedule(num_layers, depth, depth, horizon=1, decay="constant", order="even")
