"""Chooses which layers share blocks of keys and values, and says from where on a request needs them no more.

No vLLM here. A layer reads and writes keys and values for the positions that run it: a prefix of the text, since
depths never increase. Behind that prefix its blocks serve nobody but the prefix cache.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache

from ..core.schedule import Schedule

#: Layer indices; all layers occur once.
Buckets = tuple[tuple[int, ...], ...]

#: Each bucket has a block table of its own, which costs host time in every step.
MOST_BUCKETS = 8
#: Buckets are added as long as they save this share of what is held.
WORTH = 0.05


def choose_buckets(schedules: Iterable[Schedule]) -> Buckets:
    """Buckets in the order in which layers retire: the fewest that hold (nearly) the least after prompts.

    All of one size, since blocks are: unequal ones would take more memory than none at full depth. None at all if no
    schedule ever retires a layer.

    Args:
        schedules: of one model, the fastest last: its ranking is followed.
    """
    known = [schedule for schedule in schedules if not schedule.is_full]
    if not known:
        return ()
    counts = [count for count in range(1, MOST_BUCKETS + 1) if known[-1].num_layers % count == 0]
    choices = [_split(known[-1].ranking, count) for count in counts]
    held = [sum(held_layers(schedule, buckets) for schedule in known) for buckets in choices]
    chosen = next(buckets for buckets, layers in zip(choices, held, strict=True) if layers <= (1 + WORTH) * min(held))
    return chosen if len(chosen) > 1 else ()


def _split(ranking: Sequence[int], count: int) -> Buckets:
    size = len(ranking) // count
    return tuple(tuple(sorted(ranking[start : start + size])) for start in range(0, len(ranking), size))


def held_layers(schedule: Schedule, buckets: Buckets) -> float:
    """Mean number of layers whose keys and values are held, over the schedule's steps."""
    ends = retirements(schedule, buckets)
    steps = [min(max(end, 0), schedule.horizon) for end in ends]
    return sum(len(bucket) * held for bucket, held in zip(buckets, steps, strict=True)) / schedule.horizon


@lru_cache(maxsize=1024)
def retirements(schedule: Schedule, buckets: Buckets) -> tuple[float, ...]:
    """For each bucket the first position that runs none of its layers, as are all that follow.

    Counted from the prompt's end: 0 is the first step, negative ones are the prompt's last positions, minus infinity
    means that no position runs any, and infinity that there is no such position.
    """
    depths = [schedule.prompt_depth(distance) for distance in range(schedule.prompt_decay, 0, -1)]
    depths += [schedule.depth(step) for step in range(schedule.horizon)]
    falling = [-depth for depth in depths]
    rank = {layer: place for place, layer in enumerate(schedule.ranking)}
    return tuple(_end(schedule, falling, min(rank[layer] for layer in bucket)) for bucket in buckets)


def _end(schedule: Schedule, falling: Sequence[int], rank: int) -> float:
    running = bisect_left(falling, -rank)
    if running == len(falling):
        return math.inf
    return running - schedule.prompt_decay if schedule.deepest > rank else -math.inf
