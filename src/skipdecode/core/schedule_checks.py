"""What a schedule's values must be to mean something. Each raises ScheduleError."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..errors import ScheduleError
from .shapes import DECAYS, ORDERS

if TYPE_CHECKING:
    from .schedule import Schedule

#: Few enough that nothing hangs: depths are kept step by step.
MOST_TOKENS = 1_000_000


def check_decay(schedule: Schedule) -> None:
    """A decay that is known, with numbers it can have."""
    rate, stairs = schedule.rate, schedule.stairs
    require(schedule.decay in DECAYS, f"decay must be one of {', '.join(DECAYS)}, not {schedule.decay!r}")
    require(
        isinstance(rate, (int, float)) and not isinstance(rate, bool) and 0 < rate < math.inf,
        f"rate must be a finite number above 0, not {rate!r}",
    )
    require(stairs >= 2, f"stairs must be at least 2, not {stairs}")


def check_depths(schedule: Schedule) -> None:
    """Depths that never increase, within the model's layers."""
    if schedule.decay == "list":
        depths = schedule.depths if isinstance(schedule.depths, tuple) else ()
        require(bool(depths), "decay 'list' needs depths, one number of layers per step")
        for value in depths:
            check_whole("each of depths", value)
        require(
            all(a >= b for a, b in pairwise(depths)),
            f"depths must never increase (a layer once skipped has no keys and values to go back to): {depths}",
        )
        require(
            (schedule.max_depth, schedule.min_depth, schedule.horizon) == (depths[0], depths[-1], len(depths)),
            "with decay 'list', max_depth, min_depth and horizon must be the list's first, last and length; "
            "Schedule.from_depths sets them",
        )
    else:
        require(schedule.depths is None, f"depths go with decay 'list', not with {schedule.decay!r}")
    require(
        schedule.min_depth <= schedule.max_depth,
        f"min_depth {schedule.min_depth} is greater than max_depth {schedule.max_depth}",
    )
    require(
        schedule.max_depth <= schedule.num_layers,
        f"max_depth {schedule.max_depth} is greater than num_layers {schedule.num_layers}",
    )
    if schedule.prompt_layers is not None:
        check_whole("prompt_layers", schedule.prompt_layers)
        require(
            schedule.max_depth <= int(schedule.prompt_layers) <= schedule.num_layers,
            f"prompt_layers is max_depth ({schedule.max_depth}) to num_layers ({schedule.num_layers}), "
            f"not {schedule.prompt_layers}: depths never increase",
        )
    if schedule.decay == "constant":
        require(schedule.max_depth == schedule.min_depth, "decay 'constant' needs max_depth equal to min_depth")


def check_order(schedule: Schedule) -> None:
    """An order that ranks each layer once, with the warm-up layers inside every depth."""
    if isinstance(schedule.order, tuple):
        # A tuple of anything but int would compare equal for 1.0 or True: the type is checked too.
        require(
            all(type(i) is int for i in schedule.order) and sorted(schedule.order) == list(range(schedule.num_layers)),
            f"order must hold each of the layers 0 to {schedule.num_layers - 1} exactly once, not {schedule.order}",
        )
    else:
        require(schedule.order in ORDERS, f"order must be {', '.join(ORDERS)} or a permutation, not {schedule.order!r}")
    require(
        schedule.order != "top" or schedule.warmup <= schedule.min_depth,
        f"warmup {schedule.warmup} is greater than min_depth {schedule.min_depth}",
    )


def parse_prompt_layers(value: Any) -> int | str | None:
    """``prompt_layers`` as people write it: a number, also as text, or ``max``; None stays. Raises ScheduleError."""
    number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 7 else value
    valid = number is None or number == "max" or (type(number) is int and number >= 1)
    require(valid, f"--prompt-layers takes max or a number of layers, not {str(value)[:100]!r}")
    return number


def require(condition: bool, message: str) -> None:
    """Raises ScheduleError."""
    if not condition:
        raise ScheduleError(message)


def check_whole(name: str, value: Any, least: int = 1, most: int = MOST_TOKENS) -> None:
    """An int, and no bool or float that equals one."""
    require(
        type(value) is int and least <= value <= most,
        f"{name} must be a whole number from {least:,} to {most:,}, not {value!r}",
    )
