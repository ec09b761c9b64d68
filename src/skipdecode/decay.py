"""Shapes of the fall from the greatest depth to the least."""

from __future__ import annotations

import math

DECAYS = ("linear", "power", "cosine", "exponential", "step", "constant", "list")


def remaining(decay: str, step: int, horizon: int, rate: float, stairs: int) -> float:
    """How much of the greatest depth is left at ``step``: 1 at step 0, 0 at ``horizon - 1``, never increasing.

    ``power`` follows ``(g + 1) ** -rate`` and ``exponential`` ``exp(-rate * t)``, both scaled to end at 0; ``step`` has
    ``stairs`` equal levels.
    """
    if horizon == 1:
        return 0.0
    t = step / (horizon - 1)
    if decay == "cosine":
        return (1 + math.cos(math.pi * t)) / 2
    if decay in ("exponential", "power"):
        fallen, end = (t, 1.0) if decay == "exponential" else (math.log(step + 1), math.log(horizon))
        return 1 - math.expm1(-rate * fallen) / math.expm1(-rate * end)  # exact for the smallest rate too
    if decay == "step":
        return 1 - min(math.floor(t * stairs), stairs - 1) / (stairs - 1)
    return 1 - t


def mix(weight: float, most: int, least: int) -> int:
    """``weight * most + (1 - weight) * least`` to the nearest whole number, halves up."""
    return min(max(round_half_up(weight * most + (1 - weight) * least), least), most)


def round_half_up(x: float) -> int:
    """The method's rounding. The nudge absorbs the error of a sum that should be exact."""
    return math.floor(x + 0.5 + 1e-9)
