"""What a server offers: which speed-ups its requests may ask for, and the schedule of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..core.checkpoint_config import CONFIG_KEY, layer_count, resolve_schedule, trained_schedules
from ..core.schedule import Schedule
from ..errors import ScheduleError

#: What ``--additional-config '{"skipdecode": {…}}'`` may say, beside which each has its default.
OPTIONS = ("speedup", "min_speedup", "max_speedup", "prompt_layers", "schedule")


class Serving:
    """The schedules of one server, by speed-up. The same in every process: a function of the model's config and options.

    Args:
        config: the model's, as transformers reads it, with what ``--hf-overrides`` put into it.
        options: ``speedup`` (of requests that name none; default: the fastest that the model was trained for, else 1),
            ``min_speedup`` (default 1) and ``max_speedup`` (default: the greater of the fastest stored and the
            default; for a model without schedules: its layers) bound what requests may ask for, ``prompt_layers``
            (layers of every prompt: a number, where a schedule's first step runs no more; or ``"max"``, as many as that
            step runs) goes before the schedules' own. Or, alone, ``schedule``: as :meth:`Schedule.to_dict` writes it,
            for every request.

    Raises:
        ScheduleError: unknown options, or values that contradict each other or the model.
    """

    def __init__(self, config: Any, options: Mapping[str, Any] | None = None) -> None:
        options = dict(options or {})
        self.form: dict[str, Any] = {}
        self._schedules: dict[float, Schedule] = {}
        if unknown := ", ".join(sorted(set(options) - set(OPTIONS))):
            raise ScheduleError(f"unknown options of {CONFIG_KEY}: {unknown}; known are {', '.join(OPTIONS)}")
        self.config = config
        self.num_layers = layer_count(config)
        if "schedule" in options:
            self._settle_one(options)
            return
        stored = trained_schedules(config)
        # A falling depth needs rows that start together; a server's do not. Trained schedules keep their own form.
        self.form = {} if stored else {"decay": "constant"}
        self.prompt_layers: Any = options.get("prompt_layers")
        if not isinstance(self.prompt_layers, int | None) and self.prompt_layers != "max":
            raise ScheduleError(f"prompt_layers must be a number of layers or 'max', not {self.prompt_layers!r}")
        fastest = max(stored, default=float(self.num_layers))
        default = _number("speedup", options.get("speedup", max(stored, default=1.0)), 1, self.num_layers)
        self.least = _number("min_speedup", options.get("min_speedup", 1), 1, self.num_layers)
        self.most = _number(
            "max_speedup", options.get("max_speedup", max(fastest, default)), self.least, self.num_layers
        )
        self.default = self.speedup(default)
        for speedup in (self.least, self.default, self.most):
            self.schedule(speedup)  # what cannot be had is refused at the start

    def _settle_one(self, options: Mapping[str, Any]) -> None:
        """One schedule for every request: there is nothing to ask for."""
        if others := ", ".join(sorted(set(options) - {"schedule"})):
            raise ScheduleError(f"a schedule of {CONFIG_KEY} is for every request: leave out {others}")
        only = resolve_schedule(self.config, schedule=Schedule.from_dict(options["schedule"]))
        self.prompt_layers = None
        self.least = self.most = self.default = float(only.target)
        self._schedules = {self.default: only}

    @classmethod
    def of(cls, config: Any, options: Mapping[str, Any] | None = None) -> Serving | None:
        """The settings, or None for a model without schedules where no options are given: a stock server."""
        if options is None and not getattr(config, CONFIG_KEY, None):
            return None
        return cls(config, options)

    def speedup(self, value: Any) -> float:
        """A request's speed-up, checked. Raises ScheduleError, which says what is allowed."""
        return _number("speedup", value, self.least, self.most)

    def schedule(self, speedup: float) -> Schedule:
        """The schedule of a speed-up that :meth:`speedup` returned."""
        if speedup not in self._schedules:
            schedule = resolve_schedule(self.config, speedup, **self.form)
            if self.prompt_layers is not None:
                layers = self.prompt_layers
                schedule = schedule.replace(
                    prompt_layers=layers if layers == "max" else max(layers, schedule.max_depth)
                )
            self._schedules[speedup] = schedule
        return self._schedules[speedup]


def _number(name: str, value: Any, least: float, most: float) -> float:
    """A finite number within bounds; a bool or a text is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not least <= value <= most:
        raise ScheduleError(f"{name} must be a number from {least:g} to {most:g}, not {value!r}")
    return float(value)
