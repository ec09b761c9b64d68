"""Falling schedules fitted to the decode steps that batches of responses take. Pure Python."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from ..errors import ScheduleError
from ..schedule import Schedule, share_of_max

#: Relative error of the layer ratio that counts as reaching the target.
TOLERANCE = 0.01


def batch_lengths(tokens: Sequence[int], batch_size: int) -> list[int]:
    """Decode steps of each batch, if texts of these token counts are batched in order.

    A batch runs until its longest text ends. The pass over the prompt yields the first token.
    """
    longest = [max(tokens[i : i + batch_size]) for i in range(0, len(tokens), batch_size)]
    return [max(length - 1, 1) for length in longest]


def layer_ratio(schedule: Schedule, lengths: Sequence[int]) -> float:
    """Layers of the full model divided by those of the schedule, over batches of ``lengths`` decode steps."""
    ended = Counter(lengths)
    running = accumulate((-ended[step] for step in range(1, max(lengths))), initial=len(lengths))
    ran = sum(schedule.depth(step) * batches for step, batches in enumerate(running))
    return schedule.num_layers * sum(lengths) / ran


def fit(num_layers: int, speedup: float, lengths: Sequence[int], **style: Any) -> Schedule:
    """Falling schedule whose layer ratio over batches of ``lengths`` decode steps is nearest to ``speedup``.

    Of those within 1%, it is the one whose share of ``max_depth`` in ``max_depth + min_depth`` is nearest to the
    paper's budgets. The horizon lies between a third of the 90th percentile of lengths and twice it.

    Args:
        num_layers: decoder layers of the model.
        speedup: 1 to ``num_layers``.
        lengths: decode steps of each batch, at least 1.
        style: further fields of the schedule, such as ``order`` and ``decay``.

    Raises:
        ScheduleError: no falling schedule has these fields and reaches ``speedup``.
    """
    if speedup == 1:
        return Schedule.full(num_layers)
    typical = sorted(lengths)[9 * len(lengths) // 10]
    horizons = range(max(typical // 3, 2), max(2 * typical, 2) + 1)
    least = max(style.get("warmup", 1), 1) if style.get("order", "top") == "top" else 1
    most = style["prompt_layers"] if isinstance(style.get("prompt_layers"), int) else num_layers
    pairs = [(high, low) for low in range(least, most) for high in range(low + 1, most + 1)]
    pairs = [(high, low) for high, low in pairs if num_layers / high <= speedup <= num_layers / low]
    if not pairs:
        raise ScheduleError(f"no falling depths of {num_layers} layers reach {speedup:g}x: take decay constant")

    def error(schedule: Schedule) -> float:
        return abs(layer_ratio(schedule, lengths) / speedup - 1)

    tried = []
    for high, low in sorted(pairs, key=lambda pair: abs(pair[0] / sum(pair) - share_of_max(speedup))):
        at: Callable[[int], Schedule] = partial(Schedule, num_layers, high, low, **style)
        # The ratio falls as the horizon grows.
        first = bisect_left(horizons, True, key=lambda horizon: layer_ratio(at(horizon), lengths) < speedup)
        nearest = min((at(horizon) for horizon in horizons[max(first - 1, 0) : first + 1]), key=error)
        if error(nearest) <= TOLERANCE:
            return nearest
        tried.append(nearest)
    return min(tried, key=error)
