"""Reads a server's settings: the speed-ups that requests may name, and the schedule of each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ScheduleError
from ..model.adapter import read_schedules
from ..model.config import (
    CONFIG_KEY,
    bind,
    config_schedules,
    num_layers,
    untrained_warning,
)
from ..schedule import Schedule, choose_schedule, parse_prompt_layers
from .buckets import Buckets, choose_buckets

#: Keys of ``--additional-config '{"skipdecode": {…}}'``.
LIMITS = ("load_waiting", "load_token_ms")
OPTIONS = ("speedups", "speedup", "prompt_layers", "schedule", "adapter", "load_speedup", *LIMITS)
#: Speed-ups that a server offers for a model without trained schedules, up to its number of layers.
USUAL = (1.0, 2.0, 3.0, 5.0)


class Serving:
    """The settings of one server. Every process derives the same ones from the model's config and the options.

    Args:
        config: the model's config, as transformers reads it, with any ``--hf-overrides``.
        options: each may be missing or None.

            - ``speedups``: the list that requests may choose from. Default: the trained speed-ups above 1 (1, 2, 3 and
              5 for a model without any), and the values of ``speedup`` and ``load_speedup``.
            - ``speedup``: for requests that name none. Default: the highest trained one in the list, else the lowest.
            - ``prompt_layers``: how many layers every prompt runs, instead of the schedules' values: a number (a
              schedule whose first step runs more uses that depth), or ``"max"``, the depth of the first step.
            - ``schedule``: one for every request, as :meth:`Schedule.to_dict` returns it, instead of these three.
            - ``adapter``: folder of an adapter, whose schedules take the place of the config's.
            - ``load_speedup``, ``load_waiting``, ``load_token_ms``: the load policy, see
              :class:`~skipdecode.serving.load_policy.Load`.

    Attributes:
        schedules: every schedule that the server can run, by speed-up.
        default: the speed-up of requests that name none.
        load: arguments of :class:`~skipdecode.serving.load_policy.Load`, or None without a load policy.
        adapter: folder of the adapter, or None.
        buckets: groups of layers whose keys and values are freed together; empty if none retires early.
        untrained: a warning that the model was not trained for its fastest schedule, or None.

    Raises:
        FileError: there is no adapter, or a damaged one.
        ScheduleError: an option is unknown, values contradict each other or the model, or the adapter was not trained
            for a schedule.
    """

    def __init__(self, config: Any, options: Mapping[str, Any] | None = None) -> None:
        if not isinstance(options, Mapping | None):
            raise ScheduleError(f"the options of {CONFIG_KEY} are a JSON object, not {options!r}")
        options = {name: value for name, value in (options or {}).items() if value is not None}
        if unknown := ", ".join(sorted(options.keys() - set(OPTIONS))):
            raise ScheduleError(f"unknown options of {CONFIG_KEY}: {unknown}; known are {', '.join(OPTIONS)}")
        self.num_layers = num_layers(config)
        if not isinstance(options.get("adapter", ""), str | Path):
            raise ScheduleError(f"adapter is the folder of one, not {options['adapter']!r}")
        self.adapter = Path(options["adapter"]) if "adapter" in options else None
        if self.adapter is not None:
            learnt = read_schedules(self.adapter)
        stored = config_schedules(config) if self.adapter is None else learnt
        if "schedule" in options:
            if others := ", ".join(sorted(options.keys() - {"schedule", "adapter"})):
                raise ScheduleError(f"a schedule of {CONFIG_KEY} is for every request: leave out {others}")
            schedule = Schedule.from_dict(options["schedule"])
            self.default = float(schedule.target)
            self.schedules = {self.default: schedule}
            self.load = None
        else:
            offered = self._offered(options, stored)
            layers = parse_prompt_layers(options.get("prompt_layers"))
            self.schedules = {speedup: _schedule(self.num_layers, speedup, layers, stored) for speedup in offered}
            trained = [speedup for speedup in offered if speedup in stored]
            self.default = self.speedup(options.get("speedup", max(trained, default=offered[0])))
            self.load = self._load(options)
        trained = None if self.adapter is None else learnt
        self.schedules = {speedup: bind(schedule, config, trained) for speedup, schedule in self.schedules.items()}
        self.buckets: Buckets = choose_buckets(self.schedules.values())
        self.untrained = untrained_warning(self.schedules[max(self.schedules)], stored)

    def speedup(self, value: Any, name: str = "speedup") -> float:
        """Return ``value`` as a float. Raises ScheduleError, naming the option, if the server does not offer it."""
        if isinstance(value, bool) or not isinstance(value, int | float) or value not in self.schedules:
            offered = ", ".join(f"{speedup:g}" for speedup in self.schedules)
            several = "one of " if len(self.schedules) > 1 else ""
            raise ScheduleError(f"{name} must be {several}{offered}, not {repr(value)[:100]}")
        return float(value)

    def _offered(self, options: Mapping[str, Any], stored: Mapping[float, Schedule]) -> list[float]:
        """Return the speed-ups that the server offers, lowest first."""
        if (listed := options.get("speedups")) is None:
            named = [options[name] for name in ("speedup", "load_speedup") if name in options]
            # One row at full depth makes every step as deep: it is offered where it is asked for.
            faster = [speedup for speedup in stored if speedup > 1]
            usual = faster or [speedup for speedup in USUAL if speedup <= self.num_layers]
            listed = [*usual, *named]
        elif not isinstance(listed, list) or not listed:
            raise ScheduleError(f"speedups must be a list of numbers, as in [1, 2, 3], not {repr(listed)[:100]}")
        return sorted({_number("speedup", value, 1, self.num_layers) for value in listed})

    def _load(self, options: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the load policy's arguments; None without its options. Raises ScheduleError if one is missing."""
        limits = {name: _number(name, options[name], 0, 1e9) for name in LIMITS if name in options}
        if "load_speedup" not in options and not limits:
            return None
        if "load_speedup" not in options or not limits:
            raise ScheduleError("a load policy needs load_speedup, and load_waiting or load_token_ms: the limit")
        limits["load_speedup"] = self.speedup(options["load_speedup"], "load_speedup")
        if limits["load_speedup"] <= self.default:
            raise ScheduleError(
                f"load_speedup {limits['load_speedup']:g} is not above the speed-up of requests that name none, "
                f"{self.default:g}: under load nothing would get faster; give a lower --speedup"
            )
        return {name.removeprefix("load_"): value for name, value in limits.items()}


def _schedule(num_layers: int, speedup: float, layers: Any, stored: Mapping[float, Schedule]) -> Schedule:
    """Return the schedule of one speed-up, with ``layers`` as its prompt layers."""
    # A falling depth needs requests that start together; a server's do not. Trained schedules keep their decay.
    style: dict[str, Any] = {} if stored else {"decay": "constant"}
    if layers is None and stored and speedup not in stored:
        layers = stored[max(stored)].style.get("prompt_layers")  # a number may be too low at a lower speed-up
    schedule = choose_schedule(stored, num_layers, speedup, **style | ({"prompt_layers": "max"} if layers else {}))
    return schedule if layers in (None, "max") else schedule.replace(prompt_layers=max(layers, schedule.max_depth))


def _number(name: str, value: Any, least: float, most: float) -> float:
    """Return the value as a float. Raises ScheduleError if it is no number within the bounds; a bool is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:  # also true for NaN
        raise ScheduleError(f"{name} must be a number from {least:g} to {most:g}, not {repr(value)[:100]}")
    return float(value)
