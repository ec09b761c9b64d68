"""Groups layers into buckets whose KV-cache blocks are freed together, and computes when a request can free each.

Imports no vLLM. Depths never increase, so the positions that run a layer are a prefix of the text. After that prefix,
only the prefix cache still uses the layer's blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from ..schedule import Schedule
from .steps import Table

#: The layer indices of each bucket; each layer is in exactly one.
Buckets = tuple[tuple[int, ...], ...]

#: At most so many, since each bucket's block table costs host time in every step.
MOST_BUCKETS = 8
#: Fewer buckets are chosen if they keep at most this share more layers in the KV cache than the best choice.
WORTH = 0.05


def choose_buckets(schedules: Iterable[Schedule]) -> Buckets:
    """Return the fewest equal buckets that, after the prompt, keep (nearly) the fewest layers in the KV cache.

    Buckets follow the layers' ranking. vLLM's blocks have one size, so unequal buckets would take more memory than no
    buckets at full depth. Returns no buckets if freeing would save (almost) nothing.

    Args:
        schedules: of one model, the fastest last: its ranking is used.
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
    """Return the mean number of layers that a request keeps in the KV cache, over the schedule's steps."""
    ends = retirements(schedule, buckets)
    steps = [min(max(end, 0), schedule.horizon) for end in ends]
    return sum(len(bucket) * held for bucket, held in zip(buckets, steps, strict=True)) / schedule.horizon


@lru_cache(maxsize=1024)
def retirements(schedule: Schedule, buckets: Buckets) -> tuple[float, ...]:
    """Return each bucket's end: the first position from which none of its layers run.

    Positions count from the prompt's end: 0 is the first decode step, negative ones are in the prompt. Minus infinity:
    no position runs the bucket; infinity: it never ends.
    """
    table, ends = Table(schedule), list[float]()
    for bucket in buckets:
        running = int(table.runs[:, list(bucket)].any(axis=1).sum())  # the first so many rows, as depths never increase
        ends.append(math.inf if running == len(table.runs) else running - table.shift if running else -math.inf)
    return tuple(ends)
