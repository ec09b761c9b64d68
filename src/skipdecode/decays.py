"""The parts of a schedule: maximum and minimum depth, the decay between them, and the ranking of the layers."""

from __future__ import annotations

import math

DECAYS = ("linear", "power", "cosine", "exponential", "step", "constant", "list")

#: Rankings of the layers. Depth ``n`` runs the ``n`` best-ranked layers, so a greater depth adds layers.
ORDERS = ("top", "bottom", "even")

# (layers, speed-up) -> (max_depth, min_depth): "Budgets" in docs/method.md.
PAPER_BUDGETS = {
    (24, 2): (16, 8),
    (24, 5): (6, 4),
    (32, 2): (22, 11),
    (32, 3): (14, 8),
    (32, 4): (10, 6),
    (32, 5): (8, 5),
}


def target(max_depth: int, min_depth: int, num_layers: int) -> float:
    """Return a target speed-up: the paper's for its own depths (5x on 24 layers), else ``L / ((max + min) / 2)``."""
    for (layers, speedup), depths in PAPER_BUDGETS.items():
        if (layers, *depths) == (num_layers, max_depth, min_depth):
            return float(speedup)
    return round(2 * num_layers / (max_depth + min_depth), 2)


def budget(speedup: float, num_layers: int) -> tuple[int, int]:
    """Return (max_depth, min_depth) for a speed-up: the paper's if it has some, else near ``L / ((max + min) / 2)``."""
    if speedup == int(speedup) and (num_layers, int(speedup)) in PAPER_BUDGETS:
        return PAPER_BUDGETS[num_layers, int(speedup)]
    total = 2 * num_layers / speedup
    most = min(round_half_up(total * share_of_max(speedup)), num_layers)
    return most, min(max(round_half_up(total - most), 1), most)


def flat_depth(speedup: float, num_layers: int) -> int:
    """Return the depth of a constant schedule: that whose ``L / depth`` is nearest to ``speedup``."""
    below = max(int(num_layers / speedup), 1)
    return min(below, min(below + 1, num_layers), key=lambda depth: abs(num_layers / depth / speedup - 1))


def share_of_max(speedup: float) -> float:
    """Return ``max / (max + min)`` for a speed-up: on a line through the paper's budgets, 2/3 at 2x, 0.61 at 5x."""
    return min(max(2 / 3 - 0.02 * (speedup - 2), 0.6), 2 / 3)


def remaining(decay: str, step: int, horizon: int, rate: float, stairs: int) -> float:
    """Return the weight of the maximum depth at ``step``: 1 at step 0, 0 at ``horizon - 1``, never increasing.

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
    """Return ``weight * most + (1 - weight) * least`` rounded to the nearest whole number, halves up."""
    return min(max(round_half_up(weight * most + (1 - weight) * least), least), most)


def round_half_up(x: float) -> int:
    """Round to the nearest whole number, halves up; 1e-9 absorbs the error of a sum that should be exact."""
    return math.floor(x + 0.5 + 1e-9)


def ranking(order: str | tuple[int, ...], num_layers: int, warmup: int) -> tuple[int, ...]:
    """Return all layers, best-ranked first: depth ``n`` runs the first ``n``.

    ``top`` (the paper's): ``warmup`` bottom layers, then from the top down. ``bottom``: 0, 1, 2, …, as in early exit.
    ``even``: first, last, then always the layer farthest from all ranked ones, the lowest on ties.
    """
    if isinstance(order, tuple):
        return order
    if order == "bottom":
        return tuple(range(num_layers))
    if order == "top":
        return (*range(warmup), *range(num_layers - 1, warmup - 1, -1))
    ranked, distance = [0], list(range(num_layers))  # from each layer to the nearest ranked one
    while len(ranked) < num_layers:
        ranked.append(max(range(num_layers), key=lambda i: (distance[i], -i)))
        distance = [min(known, abs(i - ranked[-1])) for i, known in enumerate(distance)]
    return tuple(ranked)
