"""Schedules: how many and which layers each position runs. Pure Python; docs/method.md has the notation."""

from __future__ import annotations

import json
import math
import warnings
from bisect import bisect_left
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from .decays import DECAYS, ORDERS, budget, flat_depth, mix, ranking, remaining, target
from .errors import ScheduleError
from .files import has_key, read_json, write

#: Upper bound on ``num_layers``; no model has more.
MOST_LAYERS = 1024
#: Whether a file's bytes are a schedule, so that another schedule may replace the file.
is_schedule = has_key("min_depth")
#: Upper bound on horizons and lengths: a schedule stores the depth of each step, so more steps would take too long.
MOST_TOKENS = 1_000_000


@dataclass(frozen=True)
class Schedule:
    """A depth (number of layers to run) for each generated position, never increasing, and a ranking of the layers.

    Step ``g`` takes generated token ``g`` as input and runs the best-ranked layers, as many as its depth. The prompt
    runs all layers unless ``prompt_layers`` or ``prompt_decay`` says otherwise.

    Args:
        num_layers: decoder layers ``L`` of the model.
        max_depth: layers run at step 0.
        min_depth: layers run from step ``horizon - 1`` on.
        horizon: number of steps over which the depth falls.
        decay: shape of the fall; ``linear`` is the paper's.
        order: ranking of the layers, the first ``depth`` of which run: ``top`` (the paper's: warm-up layers, then from
            the top down), ``bottom``, ``even``, or a permutation of all layer indices.
        warmup: bottom layers that ``top`` ranks first; they count inside the depth.
        rate: steepness of the ``power`` and ``exponential`` decays.
        stairs: number of levels of the ``step`` decay.
        depths: depth of each step, for ``decay="list"``; later steps keep the last one.
        prompt_decay: number of prompt positions, the last ones, over which the depth falls linearly to ``max_depth``.
        prompt_layers: greatest depth of a prompt position, ``max_depth`` to ``L``; ``"max"`` means ``max_depth``, None
            ``L``. Lower-ranked layers never run.

    Raises:
        ScheduleError: a value is invalid, or contradicts another.

    Example:
        >>> schedule = Schedule.for_speedup(5, num_layers=24, horizon=32)
        >>> schedule.depth(0), schedule.depth(31), schedule.layers(4)
        (6, 4, (0, 21, 22, 23))
    """

    num_layers: int
    max_depth: int
    min_depth: int
    horizon: int
    decay: str = "linear"
    order: str | tuple[int, ...] = "top"
    warmup: int = 1
    rate: float = 3.0
    stairs: int = 4
    depths: tuple[int, ...] | None = None
    prompt_decay: int = 0
    prompt_layers: int | str | None = None

    def __post_init__(self) -> None:
        # JSON knows lists only; tuples keep the schedule hashable.
        for name in ("order", "depths"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.prompt_layers == "max":
            object.__setattr__(self, "prompt_layers", self.max_depth)
        _check(self)

    # --- what a step runs

    def depth(self, step: int) -> int:
        """Return how many layers step ``step`` (counted from 0) runs."""
        if step < 0:
            raise ScheduleError(f"a step is 0 or more, not {step}")
        return self._staircase[min(step, self.horizon - 1)]

    def layers(self, depth: int) -> tuple[int, ...]:
        """Return the indices of the ``depth`` best-ranked layers, in network order (lowest first)."""
        if not 1 <= depth <= self.num_layers:
            raise ScheduleError(f"a depth is 1 to {self.num_layers}, not {depth}")
        return tuple(sorted(self.ranking[:depth]))

    def prompt_depth(self, distance: int) -> int:
        """Return how many layers the ``distance``-th last prompt position runs (1: the last), whatever the padding."""
        if distance > self.prompt_decay:
            return self.deepest
        t = 1.0 if self.prompt_decay == 1 else (self.prompt_decay - distance) / (self.prompt_decay - 1)
        return mix(1 - t, self.deepest, self.max_depth)

    @property
    def deepest(self) -> int:
        """Return how many layers the first prompt positions run; no position runs more."""
        return self.prompt_layers if isinstance(self.prompt_layers, int) else self.num_layers

    def positions_per_layer(self, prompt_length: int, length: int) -> list[int]:
        """Return, for each layer, how many of ``length`` positions it runs; the first ``prompt_length`` are prompt.

        Depths never increase, so a layer that runs ``n`` positions runs the first ``n``.
        """
        inside = min(prompt_length, length)
        depths = [self.prompt_depth(prompt_length - position) for position in range(inside)]
        depths += [self.depth(step) for step in range(length - inside)]
        falling = [-depth for depth in depths]
        counts = {layer: bisect_left(falling, -rank) for rank, layer in enumerate(self.ranking)}
        return [counts[layer] for layer in range(self.num_layers)]

    def check_layers(self, num_layers: int) -> Schedule:
        """Return this schedule; raise ScheduleError if it is for another number of layers."""
        require(
            self.num_layers == num_layers, f"the schedule is for {self.num_layers} layers, the model has {num_layers}"
        )
        return self

    # --- what a schedule costs

    def average_depth(self, length: int) -> float:
        """Return the mean number of layers per step over ``length`` steps."""
        check_whole("length", length)
        inside = self._staircase[:length]
        return (sum(inside) + (length - len(inside)) * self.min_depth) / length

    def layer_ratio(self, length: int) -> float:
        """Return the speed-up in layers, ``L / average depth``, over ``length`` steps."""
        return self.num_layers / self.average_depth(length)

    @property
    def distinct_depths(self) -> tuple[int, ...]:
        """Return the different depths of the steps, deepest first."""
        return tuple(sorted(set(self._staircase), reverse=True))

    @property
    def is_full(self) -> bool:
        """Tell whether every position runs every layer."""
        return self.min_depth == self.num_layers

    @cached_property
    def ranking(self) -> tuple[int, ...]:
        """Return all layer indices, the most important first: depth ``d`` runs the layers ``ranking[:d]``."""
        return ranking(self.order, self.num_layers, self.warmup)

    @cached_property
    def _staircase(self) -> tuple[int, ...]:
        if self.depths is not None:
            return self.depths
        weights = (remaining(self.decay, g, self.horizon, self.rate, self.stairs) for g in range(self.horizon))
        return tuple(mix(weight, self.max_depth, self.min_depth) for weight in weights)

    # --- ways to make a schedule

    @classmethod
    def full(cls, num_layers: int) -> Schedule:
        """Make the schedule of the unmodified model: every position runs every layer."""
        return cls(num_layers, num_layers, num_layers, horizon=1, decay="constant", warmup=0)

    @classmethod
    def for_speedup(cls, speedup: float, num_layers: int, horizon: int, **style: Any) -> Schedule:
        """Make a schedule for a target speed-up in layers, with the paper's budget if it lists one, else by its rule.

        Args:
            speedup: full depth over average depth, 1 to ``num_layers``.
            num_layers: decoder layers of the model.
            horizon: number of steps over which the depth falls.
            style: further fields of the schedule, such as ``order`` and ``decay``.

        Raises:
            ScheduleError: the speed-up is out of range, or fields contradict each other.
        """
        check_whole("num_layers", num_layers)
        require(
            isinstance(speedup, (int, float)) and 1 <= speedup <= num_layers,
            f"a speed-up is 1 to the number of layers ({num_layers}), not {speedup}",
        )
        if speedup == 1:
            return cls.full(num_layers)
        most, least = budget(speedup, num_layers)
        if style.get("decay") == "constant":
            most = least = flat_depth(speedup, num_layers)
        return cls(num_layers, most, least, horizon, **style)

    @property
    def target(self) -> float:
        """Return the paper's target speed-up for these max and min depths; for listed depths, their layer ratio."""
        if self.depths is not None:
            return round(self.layer_ratio(self.horizon), 2)
        return target(self.max_depth, self.min_depth, self.num_layers)

    @property
    def style(self) -> dict[str, Any]:
        """Return the fields to copy for another speed-up: order, warm-up, decay and its parameters, prompt fields."""
        names = ("order", "warmup", "rate", "stairs", "prompt_decay")
        style = {name: getattr(self, name) for name in names} | {"decay": "linear" if self.depths else self.decay}
        # A prompt as deep as the first step stays so when another budget changes max_depth.
        in_prompt = "max" if self.prompt_layers == self.max_depth else self.prompt_layers
        return style | ({} if in_prompt is None else {"prompt_layers": in_prompt})

    @classmethod
    def from_depths(cls, num_layers: int, depths: list[int] | tuple[int, ...], **options: Any) -> Schedule:
        """Make a schedule of ``depths[g]`` layers at step ``g``, later the last; ``options`` are further fields."""
        require(bool(depths), "depths must hold at least one number")
        return cls(num_layers, depths[0], depths[-1], len(depths), decay="list", depths=tuple(depths), **options)

    def flat(self, depth: int) -> Schedule:
        """Return a copy in which every step runs the best-ranked ``depth`` layers, and the prompt all layers."""
        steps: dict[str, Any] = {"max_depth": depth, "min_depth": depth, "horizon": 1, "decay": "constant"}
        return self.replace(**steps, depths=None, prompt_layers=None, prompt_decay=0)

    def replace(self, **changes: Any) -> Schedule:
        """Return a copy with these fields changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, without those that are None."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items() if v is not None}

    @classmethod
    def from_dict(cls, values: dict[str, Any], *, strict: bool = True) -> Schedule:
        """Make the schedule that :meth:`to_dict` returned as ``values``.

        Args:
            strict: refuse unknown keys; else ignore them with a warning, so that models of later versions still open.

        Raises:
            ScheduleError: keys are unknown or missing, or values contradict each other.
        """
        require(isinstance(values, dict), f"a schedule is a JSON object, not {type(values).__name__}")
        names = {field.name for field in fields(cls)}
        unknown = ", ".join(map(repr, sorted(set(values) - names)))  # of the key '', repr leaves something to see
        require(not unknown or not strict, f"unknown schedule keys: {unknown}; known are {', '.join(sorted(names))}")
        if unknown:
            warnings.warn(f"a later version of skipdecode wrote {unknown} into a schedule: left out", stacklevel=2)
            values = {name: value for name, value in values.items() if name in names}
        missing = [key for key in ("num_layers", "max_depth", "min_depth", "horizon") if key not in values]
        require(not missing, f"a schedule needs {', '.join(missing)}")
        return cls(**values)

    def to_json(self) -> str:
        """Return the fields as an indented JSON object."""
        return json.dumps(self.to_dict(), indent=2)

    def save(self, path: str | Path) -> None:
        """Write the JSON to ``path``, all or nothing. Raises FileError if ``path`` is a file but no schedule."""
        write(path, self.to_json() + "\n", may_replace=is_schedule)

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """Read a file that :meth:`save` wrote. Raises ScheduleError or FileError, which name the file."""
        values = read_json(path)
        try:
            return cls.from_dict(values)
        except ScheduleError as error:
            raise ScheduleError(f"{path}: {error}") from None


def _check(schedule: Schedule) -> None:
    """Raise ScheduleError if a field of the schedule is invalid or contradicts another."""
    layers, decay, rate, order, depths = (
        getattr(schedule, name) for name in ("num_layers", "decay", "rate", "order", "depths")
    )
    check_whole("num_layers", layers, most=MOST_LAYERS)
    for name, least in (("max_depth", 1), ("min_depth", 1), ("horizon", 1), ("warmup", 0), ("prompt_decay", 0)):
        check_whole(name, getattr(schedule, name), least)
    check_whole("stairs", schedule.stairs, 2)
    require(decay in DECAYS, f"decay must be one of {', '.join(DECAYS)}, not {decay!r}")
    is_number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
    require(is_number and 0 < rate < math.inf, f"rate must be a finite number above 0, not {rate!r}")
    listed = isinstance(depths, tuple) and bool(depths)
    require(
        listed if decay == "list" else depths is None,
        "decay 'list' needs depths, one number of layers per step; depths go with decay 'list' alone",
    )
    if listed:
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
    bounds = [("min_depth", "max_depth"), ("max_depth", "num_layers")]
    if isinstance(order, tuple):
        # 1.0 and True compare equal to 1, so the type is checked too.
        require(
            all(type(i) is int for i in order) and sorted(order) == list(range(layers)),
            f"order must hold each of the layers 0 to {layers - 1} exactly once, not {order}",
        )
    else:
        require(order in ORDERS, f"order must be {', '.join(ORDERS)} or a permutation, not {order!r}")
        bounds += [("warmup", "min_depth")] if order == "top" else []
    for low, high in bounds:
        least, most = getattr(schedule, low), getattr(schedule, high)
        require(least <= most, f"{low} {least} is greater than {high} {most}")
    if schedule.prompt_layers is not None:
        check_whole("prompt_layers", schedule.prompt_layers)
        require(
            schedule.max_depth <= int(schedule.prompt_layers) <= layers,
            f"prompt_layers is max_depth ({schedule.max_depth}) to num_layers ({layers}), not "
            f"{schedule.prompt_layers}: depths never increase",
        )
    flat = schedule.max_depth == schedule.min_depth
    require(flat or decay != "constant", "decay 'constant' needs max_depth equal to min_depth")


def parse_prompt_layers(value: Any) -> int | str | None:
    """Return ``prompt_layers`` from a number, its digits, ``max`` or None. Raises ScheduleError for other values."""
    number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 7 else value
    valid = number is None or number == "max" or (type(number) is int and number >= 1)
    require(valid, f"prompt_layers is 'max' or a number of layers, not {str(value)[:100]!r}")
    return number


def require(condition: bool, message: str) -> None:
    """Raise ScheduleError unless the condition holds."""
    if not condition:
        raise ScheduleError(message)


def check_whole(name: str, value: Any, least: int = 1, most: int = MOST_TOKENS) -> None:
    """Raise ScheduleError unless ``value`` is an int, not a bool or float, from ``least`` to ``most``."""
    require(
        type(value) is int and least <= value <= most,
        f"{name} must be a whole number from {least:,} to {most:,}, not {value!r}",
    )
