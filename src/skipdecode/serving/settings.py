"""What a server offers: which speed-ups its requests may ask for, and the schedule of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..core.checkpoint_config import CONFIG_KEY, layer_count, schedule_for, trained_schedules
from ..core.schedule import Schedule
from ..errors import ScheduleError
from .buckets import Buckets, choose_buckets
from .policy import Limits

#: What ``--additional-config '{"skipdecode": {…}}'`` may say, beside which each has its default.
REQUESTS = ("speedup", "min_speedup", "max_speedup", "prompt_layers")
LOAD = ("load_speedup", "load_waiting", "load_token_ms", "load_release", "load_all")
STEPS = ("admit_together", "max_wait", "max_slowdown")
OPTIONS = (*REQUESTS, "schedule", "free_blocks", "int8_head", *STEPS, *LOAD)

MOST_TOGETHER = 4096


class Serving:
    """The schedules of one server, by speed-up: a function of the model's config and options, alike in every process.

    Args:
        config: the model's, as transformers reads it, with what ``--hf-overrides`` put into it.
        options: what holds for requests: ``speedup`` (of those that name none; default: the fastest that the model was
            trained for, else 1), ``min_speedup`` (default 1) and ``max_speedup`` (default: the greatest of the fastest
            stored, the default and that of load; for a model without schedules: its layers) bound what they may ask
            for, ``prompt_layers`` (layers of every prompt: a number, where a schedule's first step runs no more; or
            ``"max"``, as many as that step runs) goes before the schedules' own. Or in place of these ``schedule``, as
            :meth:`Schedule.to_dict` writes it, for every request. Of the server: ``free_blocks`` (default: where vLLM
            can) frees keys and values of layers that a request will not run again; ``int8_head`` (default false) gives
            the LM head weights of 8 bits; ``admit_together`` lets new requests in by groups of so many (default
            ``"auto"``: as the times of steps say), and ``max_wait`` (default 1) bounds the seconds that a slot stays
            free for a group; ``max_slowdown`` (default 1) lets steps leave out rows of more layers than others have, so
            that these take at most so many times as long per token; ``load_speedup`` with ``load_waiting``,
            ``load_token_ms`` or both, ``load_release`` and ``load_all`` say what new requests get under load, see
            :class:`~skipdecode.serving.policy.Limits`.

    Raises:
        ScheduleError: unknown options, or values that contradict each other or the model.
    """

    def __init__(self, config: Any, options: Mapping[str, Any] | None = None) -> None:
        if not isinstance(options, Mapping | None):
            raise ScheduleError(f"the options of {CONFIG_KEY} are a JSON object, not {options!r}")
        options = dict(options or {})
        if unknown := ", ".join(sorted(set(options) - set(OPTIONS))):
            raise ScheduleError(f"unknown options of {CONFIG_KEY}: {unknown}; known are {', '.join(OPTIONS)}")
        self.config = config
        self.num_layers = layer_count(config)
        self._schedules: dict[float, Schedule] = {}
        if options.get("schedule") is not None:
            options |= self._only(options)
        stored = self._schedules or trained_schedules(config)
        # A falling depth needs rows that start together; a server's do not. Trained schedules keep their own form.
        self.style: dict[str, Any] = {} if stored else {"decay": "constant"}
        self.prompt_layers = options.get("prompt_layers")
        if self.prompt_layers not in (None, "max", *range(1, self.num_layers + 1)) or self.prompt_layers is True:
            raise ScheduleError(
                f"prompt_layers must be a number from 1 to {self.num_layers}, or 'max', not {self.prompt_layers!r}"
            )
        fastest = max(stored, default=float(self.num_layers))
        default = _number("speedup", options.get("speedup", max(stored, default=1.0)), 1, self.num_layers)
        self.least = _number("min_speedup", options.get("min_speedup", 1), 1, self.num_layers)
        loaded = _number("load_speedup", options.get("load_speedup", 1), 1, self.num_layers)
        most = options.get("max_speedup", max(fastest, default, loaded))
        self.most = _number("max_speedup", most, self.least, self.num_layers)
        self.named = {*stored, default, loaded, self.least, self.most}
        self.default = self.speedup(default)
        self.limits = _limits(options, self.speedup)
        self.admit_together = _group(options.get("admit_together", "auto"))
        self.max_wait = _number("max_wait", options.get("max_wait", 1), 0, 3600)
        if "max_wait" in options and self.admit_together == 1:
            raise ScheduleError("max_wait bounds the wait for a group, and admit_together 1 makes none: leave one out")
        self.max_slowdown = _number("max_slowdown", options.get("max_slowdown", 1), 1, 1000)
        #: Whether vLLM's scheduler is told anything, and whether that was asked for.
        self.wants_scheduler = self.admit_together != 1 or self.max_slowdown > 1
        self.needs_scheduler = self.wants_scheduler and bool(set(STEPS) & set(options))
        # What cannot be had is refused at the start.
        served = {self.least, self.default, self.most, *(s for s in stored if self.least <= s <= self.most)}
        served |= {self.limits.speedup} if self.limits else set()
        schedules = [self.schedule(speedup) for speedup in sorted(served)]
        self.free_blocks = options.get("free_blocks")
        if not isinstance(self.free_blocks, bool | None):
            raise ScheduleError(f"free_blocks must be true or false, not {self.free_blocks!r}")
        self.int8_head = options.get("int8_head", False)
        if not isinstance(self.int8_head, bool):
            raise ScheduleError(f"int8_head must be true or false, not {self.int8_head!r}")
        #: Layers whose keys and values are kept and freed together; none: those of all layers are.
        self.buckets: Buckets = () if self.free_blocks is False else choose_buckets(schedules)

    def _only(self, options: Mapping[str, Any]) -> dict[str, float]:
        """One schedule for every request: there is nothing to ask for. Returns the bounds."""
        if others := ", ".join(sorted({*REQUESTS, *LOAD} & set(options))):
            raise ScheduleError(f"a schedule of {CONFIG_KEY} is for every request: leave out {others}")
        schedule = schedule_for(self.config, schedule=Schedule.from_dict(options["schedule"]))
        speedup = float(schedule.target)
        self._schedules[speedup] = schedule
        return dict.fromkeys(("speedup", "min_speedup", "max_speedup"), speedup)

    @classmethod
    def of(cls, config: Any, options: Mapping[str, Any] | None = None) -> Serving | None:
        """The settings, or None for a model without schedules where no options are given: a stock server."""
        if options is None and not getattr(config, CONFIG_KEY, None):
            return None
        return cls(config, options)

    def speedup(self, value: Any) -> float:
        """A request's speed-up, checked. Raises ScheduleError, which says what is allowed.

        Two decimals at most: each speed-up has its schedule, its table and its counters for as long as the server runs.
        """
        number = _number("speedup", value, self.least, self.most)
        if round(number, 2) != number and number not in self.named:
            raise ScheduleError(f"speedup may have two decimals, as in {number:.2f}, not {value!r}")
        return number

    def schedule(self, speedup: float) -> Schedule:
        """The schedule of a speed-up that :meth:`speedup` returned."""
        if speedup not in self._schedules:
            layers: Any = self.prompt_layers
            if layers is None and (stored := trained_schedules(self.config)) and speedup not in stored:
                layers = stored[max(stored)].style.get("prompt_layers")  # a number may be too few for a slower one
            schedule = schedule_for(self.config, speedup, **self.style | ({"prompt_layers": "max"} if layers else {}))
            if layers not in (None, "max"):
                schedule = schedule.replace(prompt_layers=max(layers, schedule.max_depth))
            self._schedules[speedup] = schedule
        return self._schedules[speedup]


def _limits(options: Mapping[str, Any], speedup: Callable[[Any], float]) -> Limits | None:
    """The load policy, if there is one. Raises ScheduleError."""
    given = {name for name in LOAD if options.get(name) is not None}
    limits = {"load_waiting", "load_token_ms"} & given
    if not given:
        return None
    if "load_speedup" not in given or not limits:
        raise ScheduleError("a load policy needs load_speedup, and load_waiting or load_token_ms: the limit")
    if not isinstance(everyone := options.get("load_all", False), bool):
        raise ScheduleError(f"load_all must be true or false, not {everyone!r}")
    waiting = _number("load_waiting", options["load_waiting"], 0, 1e9) if "load_waiting" in given else None
    token_ms = _number("load_token_ms", options["load_token_ms"], 0, 1e9) if "load_token_ms" in given else None
    release = _number("load_release", options.get("load_release", 0.5), 0, 1)
    return Limits(speedup(options["load_speedup"]), waiting, token_ms, release, everyone)


def _group(value: Any) -> Any:
    """``admit_together``: a whole number, or "auto"."""
    if value != "auto" and not (type(value) is int and 1 <= value <= MOST_TOGETHER):
        raise ScheduleError(
            f"admit_together must be a whole number from 1 to {MOST_TOGETHER}, or 'auto', not {repr(value)[:100]}"
        )
    return value


def parse_group(text: str | None) -> int | str | None:
    """``admit_together`` as people write it on a command line; what is no number is :class:`Serving`'s to judge."""
    return int(text) if text is not None and text.isdecimal() and len(text) < 7 else text


def _number(name: str, value: Any, least: float, most: float) -> float:
    """A number within bounds; a bool or a text is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:  # NaN is in no bounds
        raise ScheduleError(f"{name} must be a number from {least:g} to {most:g}, not {repr(value)[:100]}")
    return float(value)
