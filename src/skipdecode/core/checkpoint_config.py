"""What a checkpoint says of its training, under one key of its config: the method, and a schedule per speed-up.

Schedules that were calibrated later stand among the trained ones, and ``calibrated`` names the method each of them is
for. A model that was calibrated but never trained has no ``method``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..errors import FileError, ScheduleError
from ..files import locked, read_json, write
from .fitting import fit
from .planning import Predictor, plan
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


class Rule(Protocol):
    """What :func:`resolve_schedule` asks of a method; :class:`skipdecode.methods.Method` says what each means."""

    name: str
    order: str | None
    takes_form: bool

    def schedule(self, num_layers: int, speedup: float, lengths: Sequence[int]) -> Schedule:
        """The method's schedule for this speed-up over these lengths."""


def resolve_schedule(
    config: Any,
    speedup: float | None = None,
    schedule: Schedule | None = None,
    *,
    method: Rule | None = None,
    lengths: Sequence[int] | None = None,
    measure: Callable[[], Sequence[int]] | None = None,
    horizon: int | None = None,
    predictor: Predictor | None = None,
    **form: Any,
) -> Schedule:
    """The schedule that applies to a model of this config: the one place that decides it.

    1. ``schedule`` itself, if it is given.
    2. The one that the config has for ``speedup`` (without a speed-up: the fastest), unless lengths, a horizon or a
       form are asked for. Another ``prompt_layers`` alone leaves its depths.
    3. A new one for ``speedup`` (default: the fastest that the config has, else 2), in the form of the fastest one
       that the config has, changed by ``form``: the paper's budget over ``horizon``; or fitted to ``lengths``, or to
       what ``measure`` returns; or the paper's budget over the same horizon as the fastest one, else 64 tokens.
       A method with a rule of its own applies that rule to the lengths. With a ``predictor`` it is a new one in any
       case, planned so that ``speedup`` is one of the clock.

    Args:
        config: the model's, as transformers reads it.
        speedup: target, 1 to the number of layers.
        schedule: goes before everything else.
        method: only schedules that the config has for this method count, and its rule makes new ones. None: whatever
            the model was trained by counts, and new ones are SkipDecode's.
        lengths: decode steps of each batch, to fit a new schedule to whatever the config has.
        measure: returns such lengths. It is only called if a new schedule is needed, and neither ``lengths`` nor
            ``horizon`` is given.
        horizon: decode steps over which a new schedule's depth falls; goes before lengths.
        predictor: what the machine takes, for the batches to come.
        form: further fields of a new schedule: ``order``, ``decay``, ``warmup``, ….

    Raises:
        ScheduleError: the schedule does not fit the model, no schedule can be made from these values, the config's
            entry cannot be read, or the method takes no horizon and no form.
    """
    layers = layer_count(config)
    if schedule is not None:
        return _fitting(schedule, layers)
    if method is not None and not method.takes_form and (horizon is not None or form):
        raise ScheduleError(f"{method.name} has its own layer order and decay: no horizon or form can be set for it")
    trained = trained_schedules(config) if method is None else schedules_of(config, method.name)
    target = max(trained, default=DEFAULT_SPEEDUP) if speedup is None else speedup
    new = lengths is not None or horizon is not None or predictor is not None
    if target in trained and not new and set(form) <= {"prompt_layers"}:
        return _fitting(trained[target], layers).replace(**form)
    if lengths is None and horizon is None and measure is not None and predictor is None:
        lengths = measure()
    if method is not None and method.order is None:
        if predictor is not None:
            raise ScheduleError(f"{method.name} has its own rule for depths: none can be planned on the clock")
        return method.schedule(layers, target, lengths or ())
    skipping = [k for k, known in trained.items() if not known.is_full]  # a full schedule has no form
    fastest = _fitting(trained[max(skipping)], layers) if skipping else None
    fields = {**({"order": method.order} if method else {}), **(fastest.form if fastest else {}), **form}
    if predictor is not None:
        return plan(predictor, target, **fields)
    if lengths is not None and horizon is None:
        return fit(layers, target, lengths, **fields)
    span = (fastest.horizon if fastest else DEFAULT_HORIZON) if horizon is None else horizon
    return Schedule.for_speedup(target, layers, span, **fields)


def _fitting(schedule: Schedule, num_layers: int) -> Schedule:
    """The schedule, if it is for so many layers."""
    if schedule.num_layers != num_layers:
        raise ScheduleError(f"the schedule is for {schedule.num_layers} layers, the model has {num_layers}")
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
