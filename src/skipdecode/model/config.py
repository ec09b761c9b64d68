"""Read and write the config entry that records a checkpoint's training: the method, and a schedule per speed-up.

The entry also holds schedules that were calibrated after training; ``calibrated`` maps their speed-ups to the methods
they are for. A model that was calibrated but never trained has no ``method``.
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
from ..schedule import Schedule

CONFIG_KEY = "skipdecode"
#: The file in an adapter's folder that holds its schedules and names its model.
ADAPTER_FILE = "skipdecode_adapter.json"
#: Method of a config without an entry; default method, which counts as the former if all its schedules are full.
UNTRAINED, DEFAULT_METHOD = "full", "skipdecode"
#: Target and horizon if neither the user nor the model's config gives them.
DEFAULT_SPEEDUP, DEFAULT_HORIZON = 2.0, 64


def layer_count(config: Any) -> int:
    """Return the number of decoder layers of a model with this config."""
    return config.get_text_config(decoder=True).num_hidden_layers


def to_config_entry(schedules: Mapping[float, Schedule], method: str = DEFAULT_METHOD) -> dict[str, Any] | None:
    """Return the config's CONFIG_KEY entry for a model that ``method`` trained for ``schedules``, by speed-up.

    None if training taught no skipping: the method is ``full``, or SkipDecode and every schedule runs all layers.
    """
    if method == UNTRAINED or (method == DEFAULT_METHOD and all(s.is_full for s in schedules.values())):
        return None
    return {
        "method": method,
        "schedules": {speedup_key(k): schedule.to_dict() for k, schedule in sorted(schedules.items())},
    }


def set_entry(config: Any, entry: dict[str, Any] | None) -> None:
    """Give a config the entry CONFIG_KEY in place of the one it has; None takes it out."""
    if entry is not None:
        setattr(config, CONFIG_KEY, entry)
    elif hasattr(config, CONFIG_KEY):
        delattr(config, CONFIG_KEY)


def trained_method(config: Any) -> str:
    """Return the method that trained the config's model, else ``full``. Raises ScheduleError for a malformed entry."""
    return _entry(config).get("method", UNTRAINED)


def is_trained(config: Any) -> bool:
    """Tell whether the config's model was trained to skip layers. Raises ScheduleError for a malformed entry."""
    return trained_method(config) != UNTRAINED


def trained_schedules(config: Any) -> dict[float, Schedule]:
    """Return the config's schedules by target speed-up, {} if none. Raises ScheduleError for a malformed entry."""
    schedules = _entry(config).get("schedules", {})
    return {_speedup(key): Schedule.from_dict(values, strict=False) for key, values in schedules.items()}


def schedules_of(config: Any, method_name: str) -> dict[float, Schedule]:
    """Return the config's schedules that were trained with this method or calibrated for it, by target speed-up."""
    schedules = trained_schedules(config)
    if trained_method(config) == method_name != UNTRAINED:
        return schedules
    methods = _entry(config).get("calibrated", {})  # speed-up -> method
    return {k: schedule for k, schedule in schedules.items() if methods.get(speedup_key(k)) == method_name}


def save_calibrated(folder: Path, speedup: float, schedule: Schedule, method_name: str) -> None:
    """Add a schedule, calibrated for a method, to a model folder's ``config.json``; nothing else in the file changes.

    Raises:
        FileError: the config is no JSON object, or is a link.
        JobError: another process has held the config's lock for a minute.
        ScheduleError: the model was trained by another method, or the entry is malformed.
        OSError: the disk is full or read-only; the config is unchanged.
    """
    path = folder / "config.json"
    if path.is_symlink():  # as in the hub's cache, where the change would reach every user of the model
        raise FileError(f"{path} is a link to a file that others share: copy the model first")
    with locked(path, timeout=60):
        values = read_json(path)
        if not isinstance(values, dict):
            raise FileError(f"{path} is no JSON object")
        before = _checked(values.get(CONFIG_KEY), path)
        if before.get("method", method_name) != method_name:
            raise ScheduleError(f"{folder} was trained by {before['method']}: its schedules are not {method_name}'s")
        values[CONFIG_KEY] = before | {
            "schedules": before.get("schedules", {}) | {speedup_key(speedup): schedule.to_dict()},
            "calibrated": before.get("calibrated", {}) | {speedup_key(speedup): method_name},
        }
        write(path, json.dumps(values, indent=2, sort_keys=True) + "\n")


def default_schedule(config: Any) -> Schedule | None:
    """Return the config's schedule with the highest target speed-up; None if the config has no schedules."""
    schedules = trained_schedules(config)
    return schedules[max(schedules)] if schedules else None


def style_of(schedules: Mapping[float, Schedule], num_layers: int) -> tuple[int, dict[str, Any]]:
    """Return (horizon, {order, decay, …}) of the fastest schedule that skips layers, else (DEFAULT_HORIZON, {})."""
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
    new_tokens: int | None = None,
    **style: Any,
) -> Schedule:
    """Return ``schedule`` if it is given, else the config's schedule for ``speedup``, else a new one.

    A horizon or a field in ``style`` always makes a new one, except that ``prompt_layers`` alone changes only this
    field of the config's schedule. A new one has the paper's budget; the config's fastest schedule gives its horizon
    and other fields. :mod:`skipdecode.latency.resolve` fits schedules to lengths or plans them on the clock.

    Args:
        config: the model's transformers config.
        speedup: target, 1 to the number of layers. None: the config's fastest, else :data:`DEFAULT_SPEEDUP`.
        schedule: used instead of a speed-up.
        horizon: decode steps over which a new schedule's depth falls.
        new_tokens: of the longest text: without schedules in the config, depth falls over its decode steps.
        style: further fields of a new schedule: ``order``, ``decay``, ``warmup``, ….

    Raises:
        ScheduleError: the schedule is for another number of layers, or none can be made for this speed-up.
        UsageError: both a speed-up and a schedule are given.
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
    if new_tokens and not known:
        span = max(new_tokens - 1, 1)
    return Schedule.for_speedup(target, layers, span if horizon is None else horizon, **fields | style)


def untrained_warning(config: Any, schedule: Schedule) -> str | None:
    """Return a warning of poor texts if the schedule skips layers and the model was not trained for it, else None.

    Of a trained model: if it runs fewer layers, by a tenth, than every schedule that it was trained for.
    """
    depth = schedule.average_depth(schedule.horizon)
    known = [each.average_depth(each.horizon) for each in trained_schedules(config).values()]
    if schedule.is_full or (is_trained(config) and depth >= 0.9 * min(known, default=0)):
        return None
    if depth >= 0.8 * schedule.num_layers:
        expect = "its texts depend on which layers run: `skipdecode calibrate --search` measures that"
    elif depth >= 0.6 * schedule.num_layers:
        expect = "expect poor texts until it is trained (`skipdecode train`)"
    else:
        expect = "expect no readable text until it is trained (`skipdecode train`)"
    name = getattr(config, "_name_or_path", "") or "this model"
    what = f"to run fewer than {min(known):.3g} layers" if is_trained(config) else "to skip layers"
    return (
        f"{name} was not trained {what}: at {depth:.3g} of {schedule.num_layers} layers a step, {expect}. "
        "`skipdecode probe` measures what each speed costs, and what training it takes"
    )


def warn_untrained(config: Any, schedule: Schedule) -> None:
    """Issue :func:`untrained_warning`, if it returns one, as an UntrainedWarning, each text once per process."""
    if message := untrained_warning(config, schedule):
        _warn(message)


@cache  # Python forgets which warnings it has issued whenever a filter changes, as torch does
def _warn(message: str) -> None:
    warnings.warn(message, UntrainedWarning, stacklevel=4)


def speedup_key(speedup: float) -> str:
    """Format a speed-up as a key in JSON, in as few digits as identify it: ``3``, ``2.5``."""
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
    return _checked(getattr(config, CONFIG_KEY, None), "the model config")


def _checked(entry: Any, where: str | Path) -> dict[str, Any]:
    """Return ``entry``, a config's ``skipdecode`` field, or {} if empty. Raises ScheduleError if it is malformed."""
    if not entry:
        return {}
    if not (
        isinstance(entry, dict)
        and isinstance(entry.get("schedules"), dict)
        and entry["schedules"]
        and isinstance(entry.get("calibrated", {}), dict)
        and isinstance(entry.get("method", UNTRAINED), str)
    ):
        raise ScheduleError(f"{where}: {CONFIG_KEY!r} needs schedules, and may name a method: {str(entry)[:200]}")
    return entry
