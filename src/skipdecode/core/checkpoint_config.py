"""What a checkpoint says of its training, under one key of its config: the method, and a schedule per speed-up.

Schedules that were calibrated later stand among the trained ones, and ``calibrated`` names the method each of them is
for. A model that was calibrated but never trained has no ``method``.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import FileError, ScheduleError, UntrainedWarning, UsageError
from ..files import locked, read_json, write
from .schedule import Schedule

CONFIG_KEY = "skipdecode"
#: The method of a model whose config says nothing, and the one that is this same model if all its schedules are full.
UNTRAINED, DEFAULT_METHOD = "full", "skipdecode"
#: Target and horizon where neither the user nor the model's config says anything.
DEFAULT_SPEEDUP, DEFAULT_HORIZON = 2.0, 64


def layer_count(config: Any) -> int:
    """Decoder layers of a model of this config."""
    return config.get_text_config(decoder=True).num_hidden_layers


def to_config_entry(schedules: Mapping[float, Schedule], method: str = DEFAULT_METHOD) -> dict[str, Any] | None:
    """What the config says of a model trained with these (target speed-up -> schedule); None for the full model."""
    if method == UNTRAINED or (method == DEFAULT_METHOD and all(s.is_full for s in schedules.values())):
        return None
    return {"method": method, "schedules": {_key(k): schedule.to_dict() for k, schedule in sorted(schedules.items())}}


def trained_method(config: Any) -> str:
    """The method that a model of this config was trained by; ``full`` if it does not say. Raises ScheduleError."""
    name = _entry(config).get("method", UNTRAINED)
    if not isinstance(name, str):
        raise ScheduleError(f"the model config's {CONFIG_KEY!r} names no method: {name!r}")
    return name


def is_trained(config: Any) -> bool:
    """Whether a model of this config was trained to skip layers. Raises ScheduleError."""
    return trained_method(config) != UNTRAINED


def trained_schedules(config: Any) -> dict[float, Schedule]:
    """Target speed-up -> schedule that the config carries, slowest first; empty if it carries none.

    Raises ScheduleError for an entry that cannot be read.
    """
    values = _entry(config)
    if not values:
        return {}
    if not isinstance(values.get("schedules"), dict) or not values["schedules"]:
        raise ScheduleError(f"the model config's {CONFIG_KEY!r} has no schedules: {str(values)[:200]}")
    return {_speedup(k): Schedule.from_dict(schedule, strict=False) for k, schedule in values["schedules"].items()}


def schedules_of(config: Any, method_name: str) -> dict[float, Schedule]:
    """Those of :func:`trained_schedules` that the model was trained with by this method, or calibrated for it."""
    schedules = trained_schedules(config)
    if is_trained(config) and trained_method(config) == method_name:
        return schedules
    methods = _entry(config).get("calibrated")  # speed-up -> method
    if not isinstance(methods, dict):
        return {}
    return {k: schedule for k, schedule in schedules.items() if methods.get(_key(k)) == method_name}


def save_calibrated(folder: Path, speedup: float, schedule: Schedule, method_name: str) -> None:
    """Put one calibrated schedule into a model directory's config: all else in it stays as it is at that moment.

    Raises:
        FileError: the config is no JSON object, or a link.
        JobError: another process has been writing to it for a minute.
        ScheduleError: the model was trained by another method.
        OSError: the disk is full or read-only; the config is as it was.
    """
    path = folder / "config.json"
    if path.is_symlink():  # as in the hub's cache, where every user of the model would get it
        raise FileError(f"{path} is a link to a file that others share: copy the model first")
    with locked(path, timeout=60):
        values = read_json(path)
        if not isinstance(values, dict):
            raise FileError(f"{path} is no JSON object")
        before = values.get(CONFIG_KEY) or {}
        if not isinstance(before, dict) or not isinstance(before.get("schedules", {}), dict):
            raise ScheduleError(f"{path} says something of {CONFIG_KEY!r} that cannot be read: {before}")
        if before.get("method", method_name) != method_name:
            raise ScheduleError(f"{folder} was trained by {before['method']}: its schedules are not {method_name}'s")
        values[CONFIG_KEY] = before | {
            "schedules": before.get("schedules", {}) | {_key(speedup): schedule.to_dict()},
            "calibrated": before.get("calibrated", {}) | {_key(speedup): method_name},
        }
        write(path, json.dumps(values, indent=2, sort_keys=True) + "\n")


def default_schedule(config: Any) -> Schedule | None:
    """The fastest schedule that the config carries, or None."""
    schedules = trained_schedules(config)
    return schedules[max(schedules)] if schedules else None


def style_of(schedules: Mapping[float, Schedule], num_layers: int) -> tuple[int, dict[str, Any]]:
    """(horizon, style) that a new schedule takes over: those of the fastest one that skips, else the defaults."""
    skipping = [speedup for speedup, schedule in schedules.items() if not schedule.is_full]
    if not skipping:
        return DEFAULT_HORIZON, {}
    fastest = schedules[max(skipping)].check_layers(num_layers)
    return fastest.horizon, fastest.style


def schedule_for(
    config: Any,
    speedup: float | None = None,
    schedule: Schedule | None = None,
    *,
    horizon: int | None = None,
    **style: Any,
) -> Schedule:
    """The schedule of a model of this config: ``schedule`` itself, the config's own for ``speedup``, or a new one.

    The config's own is taken unless a horizon or a style is asked for; another ``prompt_layers`` alone leaves its
    depths. A new one is the paper's budget in the style and over the horizon of the config's fastest schedule, else
    over :data:`DEFAULT_HORIZON` steps. :mod:`skipdecode.planning.resolve` makes those that are fitted to lengths or
    planned on the clock.

    Args:
        config: the model's, as transformers reads it.
        speedup: target, 1 to the number of layers. None: the fastest of the config, else :data:`DEFAULT_SPEEDUP`.
        schedule: given in place of a speed-up.
        horizon: decode steps over which a new schedule's depth falls.
        style: further fields of a new schedule: ``order``, ``decay``, ``warmup``, ….

    Raises:
        ScheduleError: the schedule is for another number of layers, or none can be made for this speed-up.
        UsageError: both a speed-up and a schedule.
    """
    layers = layer_count(config)
    if schedule is not None:
        if speedup is not None:
            raise UsageError("give one of schedule and speedup")
        return schedule.check_layers(layers)
    known = trained_schedules(config)
    target = max(known, default=DEFAULT_SPEEDUP) if speedup is None else speedup
    if target in known and horizon is None and set(style) <= {"prompt_layers"}:
        return known[target].check_layers(layers).replace(**style)
    span, fields = style_of(known, layers)
    return Schedule.for_speedup(target, layers, span if horizon is None else horizon, **fields | style)


def untrained_warning(config: Any, schedule: Schedule) -> str | None:
    """What to expect of this schedule on a model that was never trained to skip layers; None for a trained one."""
    if schedule.is_full or is_trained(config):
        return None
    depth = schedule.average_depth(schedule.horizon)
    if depth >= 0.8 * schedule.num_layers:
        expect = "its texts depend on which layers run: `skipdecode calibrate --order search` measures that"
    elif depth >= 0.6 * schedule.num_layers:
        expect = "expect poor texts until it is trained (`skipdecode train`)"
    else:
        expect = "expect no readable text until it is trained (`skipdecode train`)"
    name = getattr(config, "_name_or_path", "") or "this model"
    return f"{name} was not trained to skip layers: at {depth:.3g} of {schedule.num_layers} layers a step, {expect}"


def warn_untrained(config: Any, schedule: Schedule) -> None:
    """Give :func:`untrained_warning`, if there is one, as an UntrainedWarning: each text once in a process."""
    if message := untrained_warning(config, schedule):
        _warn(message)


@cache  # Python's own memory of warnings is lost whenever somebody changes a filter, as torch does
def _warn(message: str) -> None:
    warnings.warn(message, UntrainedWarning, stacklevel=4)


def _key(speedup: float) -> str:
    """``3`` and ``2.5`` as people write them, every digit of what is longer."""
    short = f"{speedup:g}"
    return short if float(short) == speedup else repr(float(speedup))


def _speedup(key: str) -> float:
    try:
        value = float(key)
    except ValueError:
        value = math.nan
    if not 1 <= value < math.inf:
        raise ScheduleError(f"the model config's {CONFIG_KEY!r} has a schedule for {key!r}, which is no speed-up")
    return value


def _entry(config: Any) -> dict[str, Any]:
    values = getattr(config, CONFIG_KEY, None) or {}
    if not isinstance(values, dict):
        raise ScheduleError(f"the model config's {CONFIG_KEY!r} is no JSON object: {str(values)[:200]}")
    return values
