"""The form of an adapter's schedules, unless the user asks for another (docs/experiments.md)."""

from __future__ import annotations

from ..core.decays import flat_depth
from ..core.schedule import Schedule


def warmup_layers(num_layers: int, fastest: float) -> int:
    """Return how many bottom layers are never skipped: a sixth of all, at most half of those at the top speed-up."""
    return max(int(min(num_layers / 6, num_layers / fastest / 2)), 1)


def flat_schedule(num_layers: int, speedup: float, warmup: int) -> Schedule:
    """Return a schedule that skips one stretch of layers, above ``warmup`` bottom ones, the same at every step."""
    return Schedule.full(num_layers).replace(order="top", warmup=warmup).flat(flat_depth(speedup, num_layers))
