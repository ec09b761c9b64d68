"""Depths that achieve the layer ratio asked for, over the lengths that are really written. Pure Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from .budget import share_of_max
from .decay import round_half_up
from .errors import ScheduleError
from .schedule import Schedule

#: How near the achieved ratio comes where whole layers allow it.
TOLERANCE = 0.01


def achieved(schedule: Schedule, lengths: Sequence[int]) -> float:
    """Times fewer layers that decode steps run than the full model's, over batches of ``lengths`` steps each."""
    steps = sum(lengths)
    if not steps:
        raise ScheduleError("no decode step was taken: there are no lengths to fit to")
    counts = Counter(lengths)
    ran = sum(times * schedule.average_depth(length) * length for length, times in counts.items() if length)
    return schedule.num_layers * steps / ran


def batch_lengths(tokens: Sequence[int], batch_size: int) -> list[int]:
    """Decode steps of batches made, in order, of texts of so many tokens (end-of-sequence included).

    A batch runs until its longest row ends, and the first token is the prompt's.
    """
    longest = (max(tokens[i : i + batch_size]) for i in range(0, len(tokens), batch_size))
    return [max(length - 1, 1) for length in longest]


def fit(num_layers: int, speedup: float, lengths: Sequence[int], **options: Any) -> Schedule:
    """The schedule of the paper's form (max, min, linear decay) that achieves ``speedup`` over ``lengths``.

    Among the depths and horizons that come within 1%, the one whose max has nearest to the paper's share of max + min
    and whose horizon is nearest to the 90th percentile of lengths; if none does, the one that comes nearest.

    Args:
        num_layers: decoder layers of the model.
        speedup: 1 to ``num_layers``.
        lengths: decode steps of each batch, as generation reports them.
        options: further fields of the schedule, ``order`` and ``decay`` among them.

    Raises:
        ScheduleError: a speed-up that the model has not the layers for, or no lengths.
    """
    if not 1 <= speedup <= num_layers:
        raise ScheduleError(f"a speed-up is 1 to the number of layers ({num_layers}), not {speedup}")
    if speedup == 1:
        return Schedule.full(num_layers)
    ordered = sorted(lengths)
    typical = max(ordered[min(9 * len(ordered) // 10, len(ordered) - 1)], 1) if ordered else 1
    flat = options.get("decay") == "constant"
    # Two dozen at most: texts of a thousand tokens need no finer choice.
    widest = round_half_up(1.2 * typical) + 1
    horizons = range(max(typical // 3, 2), max(widest, 2) + 1, max(widest // 24, 1))
    wanted = 0.5 if flat else share_of_max(speedup)
    least = options.get("warmup", 1) if options.get("order", "top") == "top" else 1
    middle = num_layers / speedup
    best: tuple[tuple[bool, float], Schedule] | None = None
    for most in range(max(int(middle), least, 1), min(int(2 * middle) + 2, num_layers) + 1):
        for low in range(max(least, 1), most + 1):
            if (flat and low != most) or abs((most + low) / 2 / middle - 1) > 0.35:
                continue
            for horizon in (1,) if most == low else horizons:
                schedule = Schedule(num_layers, most, low, horizon, **options)
                error = abs(achieved(schedule, lengths) / speedup - 1)
                form = abs(most / (most + low) - wanted) + 0.5 * abs(horizon / typical - 1)
                rank = (True, error) if error > TOLERANCE else (False, form)
                if best is None or rank < best[0]:
                    best = rank, schedule
    if best is None:
        raise ScheduleError(f"no depths of {num_layers} layers come near {speedup}x with warm-up {least}")
    return best[1]


def bisect_ratio(
    at: Callable[[float], Schedule], low: float, high: float, speedup: float, lengths: Sequence[int]
) -> Schedule:
    """The schedule ``at(x)`` whose achieved ratio is nearest to ``speedup``, if the ratio grows with x."""
    tried: list[Schedule] = []
    for _ in range(40):
        middle = (low + high) / 2
        tried.append(at(middle))
        if achieved(tried[-1], lengths) < speedup:
            low = middle
        else:
            high = middle
    return min(tried, key=lambda schedule: abs(achieved(schedule, lengths) / speedup - 1))
