"""Fit schedules to a target speed-up over the lengths that a model actually generates. Pure Python."""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, Protocol

from ..errors import ScheduleError
from ..schedule import Schedule, decay_weight, interpolate, share_of_max

#: Relative error of the achieved ratio that counts as reaching the target.
TOLERANCE = 0.01
#: Relative error from which on a constant depth, if it is nearer, replaces a falling one.
NEAR = 0.05
#: Longest length: a schedule may still have a horizon of twice as many steps.
LONGEST = 500_000

logger = logging.getLogger(__name__)


class Measure(Protocol):
    """What a speed-up counts: layers (:class:`Lengths`), seconds (:class:`~skipdecode.latency.planner.Predictor`)."""

    typical: int  # the 90th percentile of the batches' decode steps, at least 1
    longest: int  # the decode steps of the longest batch

    def ratio(self, schedule: Schedule) -> float:
        """Return full depth's cost divided by the schedule's; fewer layers must never lower it."""


class Lengths:
    """Decode steps of batches, sorted once, so that a schedule's layers are counted per depth, not per step.

    Raises:
        ScheduleError: a length is no whole number from 0 to :data:`LONGEST`, or all are 0.
    """

    def __init__(self, lengths: Iterable[int]) -> None:
        self.ordered = list(lengths)
        if any(type(n) is not int or not 0 <= n <= LONGEST for n in self.ordered):
            raise ScheduleError(f"lengths are numbers of decode steps: whole, from 0 to {LONGEST:,}")
        self.ordered.sort()
        self.sums = [0, *accumulate(self.ordered)]
        if not self.sums[-1]:
            raise ScheduleError("no decode step was taken: there are no lengths to fit to")
        self.typical, self.longest = max(self.ordered[9 * len(self.ordered) // 10], 1), self.ordered[-1]

    def before(self, step: int) -> int:
        """Count the decode steps of all batches whose index in their batch is below ``step``."""
        short = bisect_right(self.ordered, step)
        return self.sums[short] + step * (len(self.ordered) - short)

    def ratio(self, schedule: Schedule) -> float:
        """Return the layers that all steps run at full depth, divided by those they run with the schedule."""
        # The steps before ``fall(schedule, d)`` have a depth of at least d.
        deeper = sum(
            self.before(fall(schedule, depth)) for depth in range(schedule.min_depth + 1, schedule.max_depth + 1)
        )
        return schedule.num_layers * self.sums[-1] / (schedule.min_depth * self.sums[-1] + deeper)


def fall(schedule: Schedule, depth: int) -> int:
    """Return the first step that runs fewer than ``depth`` layers; ``depth`` must be above ``min_depth``."""
    if schedule.depths is not None:
        return bisect_right(schedule.depths, -depth, key=lambda value: -value)
    s = schedule

    def below(step: int) -> bool:
        return interpolate(decay_weight(s.decay, step, s.horizon, s.rate, s.stairs), s.max_depth, s.min_depth) < depth

    return bisect_left(range(s.horizon), True, key=below)


def batch_lengths(tokens: Sequence[int], batch_size: int) -> list[int]:
    """Return the decode steps of each batch, if texts of these token counts (end-of-sequence too) are batched in order.

    A batch runs until its longest text ends; the pass over the prompt yields the first token.
    """
    longest = (max(tokens[i : i + batch_size]) for i in range(0, len(tokens), batch_size))
    return [max(length - 1, 1) for length in longest]


def constant_schedules(num_layers: int, **style: Any) -> list[Schedule]:
    """Return the constant-depth schedules that can have the fields in ``style``, shallowest first.

    Raises ScheduleError if there are none, as the prompt runs fewer layers than the warm-up.
    """
    least = max(style.get("warmup", 1) if style.get("order", "top") == "top" else 1, 1)
    in_prompt = style.get("prompt_layers")
    deepest = in_prompt if isinstance(in_prompt, int) else num_layers
    if least > deepest:
        raise ScheduleError(f"a depth is at most {deepest} layers, and at least the warm-up's {least}")
    return [Schedule(num_layers, depth, depth, 1, **style) for depth in range(least, deepest + 1)]


def nearest(at: Callable[[int], Schedule], span: range, speedup: float, measure: Measure) -> Schedule:
    """Return the ``at(i)``, ``i`` in ``span``, whose ratio is nearest to ``speedup``; it must never grow with ``i``."""
    first = bisect_left(span, True, key=lambda i: measure.ratio(at(i)) < speedup)
    return min((at(i) for i in span[max(first - 1, 0) : first + 1]), key=lambda s: _error(s, speedup, measure))


def fit(num_layers: int, speedup: float, lengths: Sequence[int] | Measure, **style: Any) -> Schedule:
    """Return the schedule of the paper's form (max, min, linear decay) that achieves ``speedup`` over ``lengths``.

    Of the falling schedules within 1% of ``speedup``, it takes the one whose max has nearest to the paper's share of
    max + min and whose horizon is nearest to the 90th percentile of lengths; if there is none, the falling schedule
    nearest to ``speedup``. It takes a constant depth only with ``decay="constant"``, or with a logged warning if no
    falling one comes within 5% and the constant one is nearer.

    Args:
        num_layers: decoder layers of the model.
        speedup: 1 to ``num_layers``.
        lengths: decode steps of each batch, as generation reports them; or another :class:`Measure`.
        style: further fields of the schedule, such as ``order`` and ``decay``.

    Raises:
        ScheduleError: the model has too few layers for the speed-up, or there are no lengths.
    """
    of_layers = isinstance(lengths, (Sequence, Lengths))  # in seconds, more is possible if some layers cost little
    if not speedup >= 1 or (of_layers and speedup > num_layers):
        raise ScheduleError(f"a speed-up is 1 to the number of layers ({num_layers}), not {speedup}")
    if speedup == 1:
        return Schedule.full(num_layers)
    measure: Measure = Lengths(lengths) if isinstance(lengths, Sequence) else lengths
    flats = constant_schedules(num_layers, **style)
    flat = nearest(flats.__getitem__, range(len(flats)), speedup, measure)
    if style.get("decay") == "constant":
        return flat
    falling = _fit_falling(flats, flat, speedup, measure, style)
    if falling is not None and _error(falling, speedup, measure) <= max(NEAR, _error(flat, speedup, measure)):
        return falling
    logger.warning(
        "at %gx, %d layers have no falling depths that come near: a constant depth of %d",
        speedup,
        num_layers,
        flat.max_depth,
    )
    return flat


def _fit_falling(
    flats: Sequence[Schedule], flat: Schedule, speedup: float, measure: Measure, style: dict[str, Any]
) -> Schedule | None:
    """Return the falling schedule within 1% of ``speedup`` most like the paper's, else the nearest; None if none falls.

    ``flats`` are the constant schedules that can have the fields in ``style``; ``flat`` is the nearest of them.
    """
    middle, typical = flat.max_depth, measure.typical
    wanted = share_of_max(flat.num_layers / middle)
    horizons = range(max(typical // 3, 2), max(2 * typical, 2) + 1)

    def off_style(pair: tuple[int, int]) -> float:
        return abs(pair[0] / sum(pair) - wanted)

    lows, mosts = range(flats[0].max_depth, middle + 1), range(middle, flats[-1].max_depth + 1)
    pairs = sorted(((most, low) for low in lows for most in mosts if most > low), key=off_style)
    best: tuple[tuple[float, float], Schedule] | None = None
    for most, low in pairs:
        if best is not None and best[0][0] == 0 and best[0][1] <= off_style((most, low)):
            break  # no later pair is nearer to the paper's share
        schedule = _move_horizon(Schedule(flat.num_layers, most, low, 2, **style), horizons, speedup, measure)
        error = _error(schedule, speedup, measure)
        off = off_style((most, low)) + 0.5 * abs(schedule.horizon / typical - 1)
        rank = (0.0, off) if error <= TOLERANCE else (error, off)
        if best is None or rank < best[0]:
            best = rank, schedule
    return best and best[1]


def refit(schedule: Schedule, speedup: float, lengths: Sequence[int] | Measure) -> Schedule | None:
    """Return the schedule with a horizon at which it achieves ``speedup`` within 1%; None if there is no such horizon.

    A schedule that already does is returned unchanged, since a model may have been trained with it. Raises
    ScheduleError if there are no lengths.
    """
    measure: Measure = Lengths(lengths) if isinstance(lengths, Sequence) else lengths
    if _error(schedule, speedup, measure) <= TOLERANCE:
        return schedule
    if schedule.depths is not None or schedule.max_depth == schedule.min_depth:
        return None
    horizons = range(2, 4 * measure.longest + 3)
    moved = _move_horizon(schedule, horizons, speedup, measure)
    return moved if _error(moved, speedup, measure) <= TOLERANCE else None


def _move_horizon(schedule: Schedule, horizons: range, speedup: float, measure: Measure) -> Schedule:
    return nearest(lambda horizon: schedule.replace(horizon=horizon), horizons, speedup, measure)


def bisect_ratio(
    at: Callable[[float], Schedule], low: float, high: float, speedup: float, lengths: Sequence[int]
) -> Schedule:
    """Return the ``at(x)``, x from ``low`` to ``high``, of the layer ratio nearest to ``speedup``; it grows with x."""
    parts = 2**30
    return nearest(lambda i: at(high - (high - low) * i / parts), range(parts + 1), speedup, Lengths(lengths))


def _error(schedule: Schedule, speedup: float, measure: Measure) -> float:
    return abs(measure.ratio(schedule) / speedup - 1)
