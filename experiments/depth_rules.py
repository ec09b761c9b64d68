"""Baselines with another rule for the depth of each step: Unified Layer Skipping, D3 and HSD, as schedules."""

from __future__ import annotations

from collections.abc import Callable

from skipdecode import Schedule


def unified(num_layers: int, speedup: float, steps: int) -> Schedule:
    """Unified Layer Skipping (arXiv 2404.06954): a constant depth of evenly spread layers, whatever the steps."""
    return Schedule.for_speedup(speedup, num_layers, order="even")


def d3(num_layers: int, speedup: float, steps: int) -> Schedule:
    """Position-aware depth decay decoding (arXiv 2503.08524): step i runs ``floor(L * alpha ** i)`` layers.

    First and last layers always run: the skipped block in the middle grows. ``alpha`` is fitted to the speed-up.
    """
    ends = [layer for pair in zip(range(num_layers), reversed(range(num_layers)), strict=True) for layer in pair]
    order = tuple(dict.fromkeys(ends))
    least = min(2, num_layers)

    def at(fall: float) -> Schedule:
        depths = [max(int(num_layers * (1 - fall) ** step + 1e-9), least) for step in range(steps)]
        return Schedule.from_depths(num_layers, depths, order=order)

    return _fitted(at, speedup, steps)


def hsd(num_layers: int, speedup: float, steps: int) -> Schedule:
    """Hierarchical skip decoding (arXiv 2403.14919): every level halves the depth, and spreads the layers evenly.

    Not from the paper: all levels last equally many steps, as many as the speed-up allows.
    """
    least = min(2, num_layers)

    def at(fall: float) -> Schedule:
        span = max((1 - fall) * 2 * steps, 0.01)
        levels = [min(int(step / span), 60) for step in range(steps)]
        depths = [max(-(-num_layers // 2**level), least) for level in levels]
        return Schedule.from_depths(num_layers, depths, order="even")

    return _fitted(at, speedup, steps)


RULES: dict[str, Callable[[int, float, int], Schedule]] = {"unified": unified, "d3": d3, "hsd": hsd}


def _fitted(at: Callable[[float], Schedule], speedup: float, steps: int) -> Schedule:
    """Schedule ``at`` the fall, 0 to 1, whose layer ratio over ``steps`` decode steps is nearest to ``speedup``."""
    if speedup == 1:
        return Schedule.full(at(0).num_layers)
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if at(middle).layer_ratio(steps) < speedup:
            low = middle
        else:
            high = middle
    return min(at(low), at(high), key=lambda each: abs(each.layer_ratio(steps) / speedup - 1))
