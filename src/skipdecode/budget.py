"""Greatest and least depth for a target speed-up: the paper's budgets where it gives one, its rule elsewhere."""

from __future__ import annotations

from .decay import round_half_up

# (layers, speed-up) -> (max_depth, min_depth), section 6 of docs/method.md.
PAPER_BUDGETS = {
    (24, 2): (16, 8),
    (24, 5): (6, 4),
    (32, 2): (22, 11),
    (32, 3): (14, 8),
    (32, 4): (10, 6),
    (32, 5): (8, 5),
}


def target(max_depth: int, min_depth: int, num_layers: int) -> float:
    """``L / ((max + min) / 2)``, or the name the paper gives its own budgets (its 5x on 24 layers is 4.8)."""
    for (layers, speedup), depths in PAPER_BUDGETS.items():
        if (layers, *depths) == (num_layers, max_depth, min_depth):
            return float(speedup)
    return round(2 * num_layers / (max_depth + min_depth), 2)


def budget(speedup: float, num_layers: int) -> tuple[int, int]:
    """(max_depth, min_depth) with ``speedup = L / ((max + min) / 2)``."""
    if speedup == int(speedup) and (num_layers, int(speedup)) in PAPER_BUDGETS:
        return PAPER_BUDGETS[num_layers, int(speedup)]
    total = 2 * num_layers / speedup
    most = min(round_half_up(total * share_of_max(speedup)), num_layers)
    return most, min(max(round_half_up(total - most), 1), most)


def flat_depth(speedup: float, num_layers: int) -> int:
    """The depth that holds at every step: ``L / speedup``, at least one layer."""
    return max(round_half_up(num_layers / speedup), 1)


def share_of_max(speedup: float) -> float:
    """``max / (max + min)``: it falls from 2/3 at 2x to 0.6 at 5x, the line through the paper's own budgets."""
    return min(max(2 / 3 - 0.02 * (speedup - 2), 0.6), 2 / 3)
