"""Depths that achieve the layer ratio asked for, over the lengths that are really written. Pure Python."""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Protocol

from ..core.decays import mix, remaining, round_half_up, share_of_max
from ..core.schedule import MOST_TOKENS, Schedule
from ..errors import ScheduleError

#: How near the achieved ratio comes where whole layers allow it.
TOLERANCE = 0.01
#: How far a falling depth may be off before a constant one, if that is nearer, takes its place.
NEAR = 0.05
#: A horizon of twice as many steps is still one that a schedule may have.
LONGEST = MOST_TOKENS // 2

logger = logging.getLogger(__name__)


class Measure(Protocol):
    """What schedules are fitted to: layers over lengths (:class:`Lengths`), or seconds on a machine's clock."""

    @property
    def typical(self) -> int:
        """Decode steps that most batches have at most, at least 1."""

    @property
    def longest(self) -> int:
        """Decode steps that the longest batch has."""

    def ratio(self, schedule: Schedule) -> float:
        """Times less than full depth takes; never less for fewer layers."""

    def flat_depth(self, num_layers: int, speedup: float, **options: Any) -> float:
        """The constant depth, between whole ones, that gives ``speedup``."""


class Lengths:
    """Decode steps of batches, sorted once, so that a schedule's layers are counted by its levels, not step by step.

    Raises:
        ScheduleError: a length that is no whole number from 0 to :data:`LONGEST`, or no steps at all.
    """

    def __init__(self, lengths: Iterable[int]) -> None:
        self.ordered = list(lengths)
        if any(type(n) is not int or not 0 <= n <= LONGEST for n in self.ordered):
            raise ScheduleError(f"lengths are numbers of decode steps: whole, from 0 to {LONGEST:,}")
        self.ordered.sort()
        self.sums = [0, *accumulate(self.ordered)]
        if not self.sums[-1]:
            raise ScheduleError("no decode step was taken: there are no lengths to fit to")

    @property
    def typical(self) -> int:
        """The 90th percentile, at least 1."""
        return max(self.ordered[9 * len(self.ordered) // 10], 1)

    @property
    def longest(self) -> int:
        """Decode steps of the longest batch."""
        return self.ordered[-1]

    def before(self, step: int) -> int:
        """How many of all steps come before ``step`` in their batch."""
        short = bisect_right(self.ordered, step)
        return self.sums[short] + step * (len(self.ordered) - short)

    def ratio(self, schedule: Schedule) -> float:
        """Times fewer layers than the full model's."""
        # Depth d is run by the steps before the one at which the schedule falls below d.
        deeper = sum(
            self.before(fall(schedule, depth)) for depth in range(schedule.min_depth + 1, schedule.max_depth + 1)
        )
        return schedule.num_layers * self.sums[-1] / (schedule.min_depth * self.sums[-1] + deeper)

    def flat_depth(self, num_layers: int, speedup: float, **options: Any) -> float:
        """``L / speedup``."""
        return num_layers / speedup


def fall(schedule: Schedule, depth: int) -> int:
    """The first step that runs fewer than ``depth`` layers, which is above ``min_depth``."""
    if schedule.depths is not None:
        return bisect_right(schedule.depths, -depth, key=lambda value: -value)
    s = schedule

    def below(step: int) -> bool:
        return mix(remaining(s.decay, step, s.horizon, s.rate, s.stairs), s.max_depth, s.min_depth) < depth

    return bisect_left(range(s.horizon), True, key=below)


def achieved(schedule: Schedule, lengths: Sequence[int]) -> float:
    """Times fewer layers that decode steps run than the full model's, over batches of ``lengths`` steps each."""
    return Lengths(lengths).ratio(schedule)


def batch_lengths(tokens: Sequence[int], batch_size: int) -> list[int]:
    """Decode steps of batches made, in order, of texts of so many tokens (end-of-sequence included).

    A batch runs until its longest row ends, and the first token is the prompt's.
    """
    longest = (max(tokens[i : i + batch_size]) for i in range(0, len(tokens), batch_size))
    return [max(length - 1, 1) for length in longest]


def fit(num_layers: int, speedup: float, lengths: Sequence[int] | Measure, **options: Any) -> Schedule:
    """The schedule of the paper's form (max, min, linear decay) that achieves ``speedup`` over ``lengths``.

    Form goes first. Among the falling depths and horizons that come within 1%, the one whose max has nearest to the
    paper's share of max + min and whose horizon is nearest to the 90th percentile of lengths; else the falling one
    that comes nearest. A constant depth is taken only with ``decay="constant"``, or (a logged warning says so) where
    it is nearer and no falling one comes within 5%.

    Args:
        num_layers: decoder layers of the model.
        speedup: 1 to ``num_layers``.
        lengths: decode steps of each batch, as generation reports them; or what else ``speedup`` is to be of.
        options: further fields of the schedule, ``order`` and ``decay`` among them.

    Raises:
        ScheduleError: a speed-up that the model has not the layers for, or no lengths.
    """
    of_layers = isinstance(lengths, (Sequence, Lengths))  # seconds may fall by more, where some layers cost little
    if not speedup >= 1 or (of_layers and speedup > num_layers):
        raise ScheduleError(f"a speed-up is 1 to the number of layers ({num_layers}), not {speedup}")
    if speedup == 1:
        return Schedule.full(num_layers)
    measured: Measure = Lengths(lengths) if isinstance(lengths, Sequence) else lengths
    least = max(options.get("warmup", 1) if options.get("order", "top") == "top" else 1, 1)
    in_prompt = options.get("prompt_layers")
    deepest = in_prompt if isinstance(in_prompt, int) else num_layers

    def error(schedule: Schedule) -> float:
        return abs(measured.ratio(schedule) / speedup - 1)

    if least > deepest:
        raise ScheduleError(f"no depths of {deepest} layers come near {speedup}x with warm-up {least}")
    flat = min((Schedule(num_layers, depth, depth, 1, **options) for depth in range(least, deepest + 1)), key=error)
    bounds = (least, deepest)
    falling = None if options.get("decay") == "constant" else _fit_fall(num_layers, speedup, measured, bounds, options)
    if falling is not None and error(falling) <= max(NEAR, error(flat)):
        return falling
    if options.get("decay") != "constant":
        logger.warning(
            "at %gx, %d layers have no falling depths that come near: a constant depth of %d",
            speedup,
            num_layers,
            flat.max_depth,
        )
    return flat


def _fit_fall(
    num_layers: int, speedup: float, lengths: Measure, bounds: tuple[int, int], options: dict[str, Any]
) -> Schedule | None:
    """The falling schedule of the best form within 1%, else the one that comes nearest."""
    middle = lengths.flat_depth(num_layers, speedup, **options)
    typical, wanted, (least, deepest) = lengths.typical, share_of_max(num_layers / middle), bounds
    # Two dozen horizons at most: texts of a thousand tokens need no finer choice.
    widest = round_half_up(1.2 * typical) + 1
    horizons = range(max(typical // 3, 2), max(widest, 2) + 1, max(widest // 24, 1))
    best: tuple[tuple[float, float], Schedule] | None = None
    pairs = [
        (most, low)
        for most in range(max(int(middle), least + 1), min(int(2 * middle) + 2, deepest) + 1)
        for low in range(least, most)
        if abs((most + low) / 2 / middle - 1) <= 0.35
    ]
    for finest in (False, True):  # if none of them is within 1%, every horizon up to twice the texts
        for most, low in pairs:
            first = Schedule(num_layers, most, low, horizons[0], **options)
            for schedule in (
                _horizons(first, speedup, lengths, horizons[0], max(2 * typical, 2))
                if finest
                else [replace(first, horizon=horizon) for horizon in horizons]
            ):
                error = abs(lengths.ratio(schedule) / speedup - 1)
                style = abs(most / (most + low) - wanted) + 0.5 * abs(schedule.horizon / typical - 1)
                rank = (0, style) if error <= TOLERANCE else (error, style)
                if best is None or rank < best[0]:
                    best = rank, schedule
        if best is not None and best[0][0] == 0:
            break
    return best and best[1]


def _horizons(schedule: Schedule, speedup: float, lengths: Measure, low: int, high: int) -> list[Schedule]:
    """Of this schedule over ``low`` to ``high`` tokens, the two on either side of ``speedup``.

    The longer the horizon, the less is saved: the ratio never grows with it.
    """
    span = range(low, high + 1)
    at = bisect_left(span, True, key=lambda horizon: lengths.ratio(replace(schedule, horizon=horizon)) < speedup)
    return [replace(schedule, horizon=span[i]) for i in (at - 1, at) if 0 <= i < len(span)]


def refit(schedule: Schedule, speedup: float, lengths: Sequence[int] | Measure) -> Schedule | None:
    """The same depths over the horizon at which they achieve ``speedup`` within 1%; None if there is no such horizon.

    The schedule itself if it does already: nothing that was trained is moved without need.

    Raises:
        ScheduleError: no lengths.
    """
    measured: Measure = Lengths(lengths) if isinstance(lengths, Sequence) else lengths
    moved = [schedule]
    if schedule.depths is None and schedule.max_depth > schedule.min_depth:
        moved += _horizons(schedule, speedup, measured, 2, 4 * measured.longest + 2)
    errors = [abs(measured.ratio(each) / speedup - 1) for each in moved]
    if errors[0] <= TOLERANCE:
        return schedule
    best = min(range(len(moved)), key=errors.__getitem__)
    return moved[best] if errors[best] <= TOLERANCE else None


def bisect_ratio(
    at: Callable[[float], Schedule], low: float, high: float, speedup: float, lengths: Sequence[int]
) -> Schedule:
    """The schedule ``at(x)`` whose achieved ratio is nearest to ``speedup``, if the ratio grows with x."""
    measured = Lengths(lengths)
    tried: list[tuple[float, Schedule]] = []
    for _ in range(40):
        middle = (low + high) / 2
        schedule = at(middle)
        ratio = measured.ratio(schedule)
        tried.append((abs(ratio / speedup - 1), schedule))
        low, high = (middle, high) if ratio < speedup else (low, middle)
    return min(tried, key=lambda pair: pair[0])[1]
