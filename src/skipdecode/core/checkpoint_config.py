"""What a checkpoint says of its training, under one key of its config: the method, and a schedule per speed-up.

Schedules that were calibrated later stand among the trained ones, and ``calibrated`` names the method each of them is
for. A model that was calibrated but never trained has no ``method``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import FileError, ScheduleError
from ..files import locked, read_json, write
from .schedule import Schedule

CONFIG_KEY = "skipdecode"


def to_config_entry(schedules: Mapping[float, Schedule], method: str = "skipdecode") -> dict[str, Any] | None:
    """What the config says of a model trained with these (target speed-up -> schedule); None for the full model."""
    if method == "full" or (method == "skipdecode" and all(schedule.is_full for schedule in schedules.values())):
        return None
    return {"method": method, "schedules": {_key(k): schedule.to_dict() for k, schedule in sorted(schedules.items())}}


def trained_method(config: Any) -> str:
    """The method that a model of this config was trained by; ``full`` if it does not say. Raises ScheduleError."""
    name = _entry(config).get("method", "full")
    if not isinstance(name, str):
        raise ScheduleError(f"the model config's {CONFIG_KEY!r} names no method: {name!r}")
    return name


def trained_schedules(config: Any) -> dict[float, Schedule]:
    """Target speed-up -> schedule that the config carries, slowest first; empty if it carries none.

    Raises ScheduleError for an entry that cannot be read.
    """
    values = _entry(config)
    if not values:
        return {}
    if not isinstance(values.get("schedules"), dict) or not values["schedules"]:
        raise ScheduleError(f"the model config's {CONFIG_KEY!r} has no schedules: {str(values)[:200]}")
    return {_speedup(k): Schedule.from_dict(schedule) for k, schedule in values["schedules"].items()}


def schedules_of(config: Any, method_name: str) -> dict[float, Schedule]:
    """Those of :func:`trained_schedules` that the model was trained with by this method, or calibrated for it."""
    known = trained_schedules(config)
    if trained_method(config) == method_name:
        return known
    fitted = _entry(config).get("calibrated")
    return {k: plan for k, plan in known.items() if isinstance(fitted, dict) and fitted.get(_key(k)) == method_name}


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
    return fastest(trained_schedules(config))


def fastest(known: Mapping[float, Schedule]) -> Schedule | None:
    """The schedule of the greatest speed-up, or None."""
    return known[max(known)] if known else None


def resolve_schedule(config: Any, speedup: float | None = None, schedule: Schedule | None = None) -> Schedule:
    """What a user means by these, for a model of this config.

    The ``schedule`` itself; else the one trained for ``speedup``, or that budget in the fastest trained one's form;
    else the fastest trained one, else 2x over 64 tokens. Raises ScheduleError if it does not fit the model.
    """
    layers = config.get_text_config(decoder=True).num_hidden_layers
    if schedule is None and (known := trained_schedules(config)):
        fastest = known[max(known)]
        schedule = fastest if speedup is None else known.get(speedup) or fastest.with_speedup(speedup)
    if schedule is None:
        schedule = Schedule.for_speedup(2 if speedup is None else speedup, layers, horizon=64)
    if schedule.num_layers != layers:
        raise ScheduleError(f"the schedule is for {schedule.num_layers} layers, the model has {layers}")
    return schedule


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
