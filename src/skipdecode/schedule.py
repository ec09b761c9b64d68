"""Schedules: how many and which layers each position runs. Pure Python; docs/method.md has the notation."""

from __future__ import annotations

import json
import math
import warnings
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from .errors import ScheduleError
from .files import read_json, write

DECAYS = ("linear", "power", "cosine", "exponential", "step", "constant", "list")
#: Rankings of the layers by name. Depth ``n`` runs the ``n`` best-ranked layers, so a greater depth adds layers.
ORDERS = ("top", "bottom", "even")
#: The paper's budgets: (layers, speed-up) -> (max_depth, min_depth).
PAPER_BUDGETS = {
    (24, 2): (16, 8),
    (24, 5): (6, 4),
    (32, 2): (22, 11),
    (32, 3): (14, 8),
    (32, 4): (10, 6),
    (32, 5): (8, 5),
}


@dataclass(frozen=True)
class Schedule:
    """A depth (number of layers to run) for each generated position, never increasing, and a ranking of the layers.

    Step ``g`` takes generated token ``g`` as input and runs the best-ranked layers, as many as its depth. The prompt
    runs all layers unless ``prompt_layers`` or ``prompt_decay`` says otherwise.

    Args:
        num_layers: decoder layers ``L`` of the model.
        max_depth, min_depth: layers run at step 0, and from step ``horizon - 1`` on.
        horizon: number of steps over which the depth falls.
        decay: shape of the fall; ``linear`` is the paper's.
        order: ranking of the layers, the first ``depth`` of which run. ``top``, the paper's, ranks the bottom layers
            always kept first, then from the top down. Others: ``bottom``, ``even``, or a permutation of all indices.
        warmup: bottom layers always kept by ``top``; they count inside the depth.
        rate: steepness of the ``power`` and ``exponential`` decays.
        stairs: number of levels of the ``step`` decay.
        depths: depth of each step, for ``decay="list"``; later steps keep the last one.
        prompt_decay: number of prompt positions, the last ones, over which the depth falls linearly to ``max_depth``.
        prompt_layers: greatest depth of a prompt position, ``max_depth`` to ``L``; ``"max"`` means ``max_depth``, None
            ``L``. Lower-ranked layers never run.

    Raises:
        ScheduleError: a value is invalid, or contradicts another.

    Example:
        >>> schedule = Schedule.for_speedup(5, num_layers=24, horizon=32, decay="linear")
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
        layers, most, least = self.num_layers, self.max_depth, self.min_depth
        order, depths, warmup = self.order, self.depths, self.warmup
        known = sorted(order) == list(range(layers)) if isinstance(order, tuple) else order in ORDERS
        in_prompt = layers if self.prompt_layers is None else self.prompt_layers
        rules = {
            f"depths must be 1 to the number of layers, min_depth first: min {least}, max {most}, layers {layers}": (
                1 <= least <= most <= layers
            ),
            f"horizon must be 1 or more, not {self.horizon}": self.horizon >= 1,
            f"prompt_decay must be 0 or more, not {self.prompt_decay}": self.prompt_decay >= 0,
            f"stairs must be 2 or more, not {self.stairs}": self.stairs >= 2,
            f"rate must be a finite number above 0, not {self.rate}": 0 < self.rate < math.inf,
            f"decay must be one of {', '.join(DECAYS)}, not {self.decay!r}": self.decay in DECAYS,
            "depths and decay='list' go together": bool(depths) == (self.decay == "list"),
            "max_depth, min_depth and horizon contradict depths: use Schedule.from_depths": (
                not depths or (most, least, self.horizon) == (depths[0], depths[-1], len(depths))
            ),
            f"depths must never increase, since a skipped layer holds no keys to go back to: {depths}": (
                not depths or all(a >= b for a, b in pairwise(depths))
            ),
            "decay 'constant' needs max_depth equal to min_depth": self.decay != "constant" or most == least,
            f"order must be {', '.join(ORDERS)} or hold each of the layers 0 to {layers - 1} once, not {order}": known,
            f"warmup must be 0 to min_depth ({least}), not {warmup}": order != "top" or 0 <= warmup <= least,
            f"prompt_layers must be max_depth ({most}) to num_layers ({layers}), not {in_prompt}": (
                isinstance(in_prompt, int) and most <= in_prompt <= layers
            ),
        }
        for rule, holds in rules.items():
            if not holds:
                raise ScheduleError(rule)

    # --- what a step runs

    def depth(self, step: int) -> int:
        """Number of layers that step ``step``, counted from 0, runs."""
        assert step >= 0
        return self._depths[min(step, self.horizon - 1)]

    def layers(self, depth: int) -> tuple[int, ...]:
        """Indices of the ``depth`` best-ranked layers, in network order, lowest first."""
        if not 1 <= depth <= self.num_layers:
            raise ScheduleError(f"a depth is 1 to {self.num_layers}, not {depth}")
        return tuple(sorted(self.ranking[:depth]))

    def prompt_depth(self, distance: int) -> int:
        """Number of layers that the ``distance``-th last prompt position runs; 1 is the last position."""
        if distance > self.prompt_decay:
            return self.deepest
        t = 1.0 if self.prompt_decay == 1 else (self.prompt_decay - distance) / (self.prompt_decay - 1)
        return interpolate(1 - t, self.deepest, self.max_depth)

    @property
    def deepest(self) -> int:
        """Number of layers that the first prompt positions run; no position runs more."""
        return self.prompt_layers if isinstance(self.prompt_layers, int) else self.num_layers

    def positions_per_layer(self, prompt_length: int, length: int) -> list[int]:
        """Number of positions that each layer runs, of ``length`` positions; the first ``prompt_length`` are prompt.

        Depths never increase, so a layer that runs ``n`` positions runs the first ``n``.
        """
        inside = min(prompt_length, length)
        depths = [self.prompt_depth(prompt_length - position) for position in range(inside)]
        depths += [self.depth(step) for step in range(length - inside)]
        falling = [-depth for depth in depths]
        counts = [0] * self.num_layers
        for rank, layer in enumerate(self.ranking):
            counts[layer] = bisect_left(falling, -rank)
        return counts

    @property
    def prompt_layer_sets(self) -> set[tuple[int, ...]]:
        """Sets of layers, each in network order, that prompt positions run."""
        return {self.layers(self.prompt_depth(distance)) for distance in range(1, self.prompt_decay + 2)}

    @property
    def step_layer_sets(self) -> set[tuple[int, ...]]:
        """Sets of layers, each in network order, that decode steps run."""
        return {self.layers(depth) for depth in self.distinct_depths}

    # --- what a schedule costs

    def average_depth(self, length: int) -> float:
        """Mean number of layers per step over ``length`` steps."""
        return sum(map(self.depth, range(length))) / length

    def layer_ratio(self, length: int) -> float:
        """Speed-up in layers, ``L / average depth``, over ``length`` steps."""
        return self.num_layers / self.average_depth(length)

    @property
    def distinct_depths(self) -> tuple[int, ...]:
        """Different depths of the steps, deepest first."""
        return tuple(sorted(set(self._depths), reverse=True))

    @property
    def is_full(self) -> bool:
        """Whether every position runs every layer."""
        return self.min_depth == self.num_layers

    @cached_property
    def ranking(self) -> tuple[int, ...]:
        """All layer indices, the most important first: depth ``d`` runs the layers ``ranking[:d]``.

        ``top``, as in the SkipDecode paper: ``warmup`` bottom layers, then from the top down. ``bottom``: 0, 1, 2, …,
        as in early exit. ``even``: first, last, then always the layer farthest from all ranked ones, the lowest on
        ties. A permutation is returned as it is.
        """
        layers = range(self.num_layers)
        if isinstance(self.order, tuple):
            return self.order
        if self.order == "bottom":
            return tuple(layers)
        if self.order == "top":
            return (*layers[: self.warmup], *reversed(layers[self.warmup :]))
        ranked = [0]
        distance = list(layers)  # from each layer to the nearest ranked one
        while len(ranked) < self.num_layers:
            ranked.append(max(layers, key=lambda i: (distance[i], -i)))
            distance = [min(known, abs(i - ranked[-1])) for i, known in enumerate(distance)]
        return tuple(ranked)

    @cached_property
    def _depths(self) -> tuple[int, ...]:
        if self.depths:
            return self.depths
        weights = (decay_weight(self.decay, g, self.horizon, self.rate, self.stairs) for g in range(self.horizon))
        return tuple(interpolate(weight, self.max_depth, self.min_depth) for weight in weights)

    # --- ways to make a schedule

    @classmethod
    def full(cls, num_layers: int) -> Schedule:
        """Schedule of the full model: every position runs every layer."""
        return cls(num_layers, num_layers, num_layers, horizon=1, decay="constant", warmup=0)

    @classmethod
    def for_speedup(
        cls, speedup: float, num_layers: int, horizon: int = 64, *, decay: str = "constant", **style: Any
    ) -> Schedule:
        """Schedule for a target speed-up in layers, ``num_layers`` over the average depth: 1 to ``num_layers``.

        Args:
            speedup: the target.
            num_layers: decoder layers of the model.
            horizon: number of steps over which the depth falls; a constant depth needs none.
            decay: ``constant`` runs the depth whose ``L / depth`` is nearest to ``speedup``. With ``linear`` and the
                others the depth falls by the paper's budget, if it lists one, else by its rule.
            style: further fields of the schedule, such as ``order`` and ``warmup``.
        """
        if not 1 <= speedup <= num_layers:
            raise ScheduleError(f"a speed-up is 1 to the number of layers ({num_layers}), not {speedup}")
        if speedup == 1:
            return cls.full(num_layers)
        if decay == "constant":
            depth = flat_depth(speedup, num_layers)
            return cls(num_layers, depth, depth, 1, decay, **style)
        most, least = budget(speedup, num_layers)
        return cls(num_layers, most, least, horizon, decay, **style)

    @property
    def target(self) -> float:
        """Target speed-up, ``L / ((max + min) / 2)``; the paper's name for its own depths, such as 5x on 24 layers."""
        if self.depths:
            return round(self.layer_ratio(self.horizon), 2)
        for (layers, speedup), depths in PAPER_BUDGETS.items():
            if (layers, *depths) == (self.num_layers, self.max_depth, self.min_depth):
                return float(speedup)
        return round(2 * self.num_layers / (self.max_depth + self.min_depth), 2)

    @classmethod
    def from_depths(cls, num_layers: int, depths: Sequence[int], **options: Any) -> Schedule:
        """Schedule of ``depths[g]`` layers at step ``g``, later the last; ``options`` are further fields."""
        return cls(num_layers, depths[0], depths[-1], len(depths), decay="list", depths=tuple(depths), **options)

    def flat(self, depth: int) -> Schedule:
        """Copy in which every step runs the best-ranked ``depth`` layers, and the prompt all layers."""
        return Schedule(self.num_layers, depth, depth, 1, "constant", self.order, self.warmup)

    def replace(self, **changes: Any) -> Schedule:
        """Copy with these fields changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Fields as JSON values, without those that are None."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items() if v is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Schedule:
        """Schedule that :meth:`to_dict` returned as ``values``; keys of later versions are ignored with a warning."""
        known = {field.name for field in fields(cls)}
        try:
            if unknown := sorted(values.keys() - known):
                warnings.warn(f"unknown fields of a schedule are ignored: {', '.join(unknown)}", stacklevel=2)
            return cls(**{name: value for name, value in values.items() if name in known})
        except (TypeError, AttributeError) as error:
            raise ScheduleError(f"not a schedule: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the JSON to ``path``, all or nothing."""
        write(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """Read a file that :meth:`save` wrote. Raises ScheduleError or FileError, which name the file."""
        values = read_json(path)
        try:
            return cls.from_dict(values)
        except ScheduleError as error:
            raise ScheduleError(f"{path}: {error}") from None


def choose_schedule(
    trained: Mapping[float, Schedule], num_layers: int, speedup: float | None = None, **style: Any
) -> Schedule:
    """Schedule that applies at a speed: the trained one if there is one, else a new one.

    Args:
        trained: schedules that the model or its adapter was trained for, by target speed-up.
        num_layers: decoder layers of the model.
        speedup: target, 1 to ``num_layers``. None: the slowest trained speed above 1; the full model if there is none.
        style: fields of a new schedule, which is constant unless ``decay`` says otherwise; its order and bottom layers
            kept are those of the trained ones. ``prompt_layers`` alone changes only this field of a trained schedule.
    """
    if speedup is None:
        speedup = min((known for known in trained if known > 1), default=1)
    if speedup in trained and style.keys() <= {"prompt_layers"}:
        return trained[speedup].replace(**style)
    skipping = {known: schedule for known, schedule in trained.items() if not schedule.is_full}
    if skipping and speedup > 1:
        fastest = skipping[max(skipping)]
        depth = flat_depth(speedup, num_layers)
        style = {"order": fastest.order, "warmup": min(fastest.warmup, depth)} | style
    return Schedule.for_speedup(speedup, num_layers, **style)


class SkippedSpan(NamedTuple):
    """Layers ``start`` to ``stop - 1``, which a position skips; it runs those before and after, if there are any."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.start}-{self.stop}"


def skipped_spans(layers: Sequence[int], num_layers: int) -> list[SkippedSpan]:
    """Spans between the layers that a position runs, in network order."""
    return [SkippedSpan(a + 1, b) for a, b in pairwise((-1, *layers, num_layers)) if b > a + 1]


# --- the parts: depths, and the decay between them


def budget(speedup: float, num_layers: int) -> tuple[int, int]:
    """(max_depth, min_depth) for a speed-up: the paper's if it lists some, else near ``L / ((max + min) / 2)``."""
    if (num_layers, speedup) in PAPER_BUDGETS:
        return PAPER_BUDGETS[num_layers, int(speedup)]
    total = 2 * num_layers / speedup
    share = min(max(2 / 3 - 0.02 * (speedup - 2), 0.6), 2 / 3)  # on a line through the paper's budgets: 0.61 at 5x
    most = min(round_half_up(total * share), num_layers)
    return most, min(max(round_half_up(total - most), 1), most)


def flat_depth(speedup: float, num_layers: int) -> int:
    """Depth of a constant schedule: that whose ``L / depth`` is nearest to ``speedup``."""
    below = max(int(num_layers / speedup), 1)
    return min(below, min(below + 1, num_layers), key=lambda depth: abs(num_layers / depth / speedup - 1))


def decay_weight(decay: str, step: int, horizon: int, rate: float, stairs: int) -> float:
    """Weight of the maximum depth at ``step``: 1 at step 0, 0 at ``horizon - 1``, never increasing.

    ``power`` is ``(g + 1) ** -rate``, ``exponential`` ``exp(-rate * t)``, both scaled to end at 0.
    """
    if horizon == 1:
        return 0.0
    t = step / (horizon - 1)
    if decay == "cosine":
        return (1 + math.cos(math.pi * t)) / 2
    if decay == "exponential":
        return 1 - math.expm1(-rate * t) / math.expm1(-rate)  # expm1 is exact for the smallest rate too
    if decay == "power":
        return 1 - math.expm1(-rate * math.log(step + 1)) / math.expm1(-rate * math.log(horizon))
    if decay == "step":
        return 1 - min(math.floor(t * stairs), stairs - 1) / (stairs - 1)
    return 1 - t


def interpolate(weight: float, most: int, least: int) -> int:
    """``weight * most + (1 - weight) * least``, rounded to the nearest whole number, halves up."""
    return min(max(round_half_up(weight * most + (1 - weight) * least), least), most)


def round_half_up(x: float) -> int:
    """Nearest whole number, halves up; 1e-9 absorbs the error of a sum that should be exact."""
    return math.floor(x + 0.5 + 1e-9)
