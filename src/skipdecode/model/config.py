"""The config entry that records a checkpoint's training, and the binding of schedules to a model."""

import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import nn

from ..errors import ModelError, ScheduleError, UntrainedWarning
from ..schedule import Schedule, skipped_spans
from .inspect import gates_of, kv_shared_layers, text_config

CONFIG_KEY = "skipdecode"


def num_layers(config: Any) -> int:
    """Number of decoder layers of a model with this config."""
    return text_config(config).num_hidden_layers


def bind(schedule: Schedule, config: Any, trained: Mapping[float, Schedule] | None = None) -> Schedule:
    """Schedule as a model runs it: layers that lend their keys and values rank before those that borrow them.

    ``trained`` are the schedules of the attached adapter, by target speed-up; None without an adapter.

    Raises:
        ScheduleError: the schedule is for another number of layers, or the adapter was not trained to skip its layers.
    """
    if schedule.num_layers != num_layers(config):
        raise ScheduleError(f"the schedule is for {schedule.num_layers} layers, the model has {num_layers(config)}")
    shared = kv_shared_layers(config)
    order: dict[int, None] = {}
    for layer in schedule.ranking:
        order.setdefault(shared.get(layer, layer))
        order.setdefault(layer)
    if tuple(order) != schedule.ranking:
        schedule = schedule.replace(order=tuple(order))
    if trained is None:
        return schedule
    known_in_prompt = set().union(*(each.prompt_layer_sets for each in trained.values()))
    known = set().union(*(each.step_layer_sets for each in trained.values()))
    unknown = (schedule.prompt_layer_sets - known_in_prompt) | (schedule.step_layer_sets - known)
    for layers in sorted(unknown):
        if spans := skipped_spans(layers, schedule.num_layers):
            skipped = ", ".join(map(str, spans))
            speeds = " and ".join(f"{speedup:g}x" for speedup in trained)
            raise ScheduleError(f"the adapter cannot skip layers {skipped}: it was trained for {speeds}")
    return schedule


def trained_schedules(model: nn.Module) -> dict[float, Schedule]:
    """Schedules of the attached adapter by target speed-up, else those of the model's config; {} if it has none."""
    gates = gates_of(model)
    if gates is not None and gates.adapter is not None:
        return dict(gates.adapter.schedules)
    return config_schedules(model.config)


# --- the entry


def to_config_entry(schedules: Mapping[float, Schedule], method: str = "skipdecode") -> dict[str, Any] | None:
    """Entry CONFIG_KEY of a model that ``method`` trained for ``schedules``, by speed-up.

    None if training taught no skipping: the method is ``full``, or SkipDecode and every schedule runs all layers.
    """
    if method == "full" or (method == "skipdecode" and all(s.is_full for s in schedules.values())):
        return None
    by_key = {speedup_key(k): schedule.to_dict() for k, schedule in sorted(schedules.items())}
    return {"method": method, "schedules": by_key}


def set_entry(config: Any, entry: dict[str, Any] | None) -> None:
    """Replace a config's entry CONFIG_KEY; None deletes it."""
    if entry is not None:
        setattr(config, CONFIG_KEY, entry)
    elif hasattr(config, CONFIG_KEY):
        delattr(config, CONFIG_KEY)


def trained_method(config: Any) -> str:
    """Method that trained the config's model; ``full`` without an entry."""
    return (getattr(config, CONFIG_KEY, None) or {}).get("method", "full")


def config_schedules(config: Any) -> dict[float, Schedule]:
    """Schedules of a config by target speed-up; {} if it has none."""
    return parse_schedules(getattr(config, CONFIG_KEY, None) or {}, f"the config's entry {CONFIG_KEY}")


def parse_schedules(entry: Any, where: str) -> dict[float, Schedule]:
    """Schedules by target speed-up of JSON values that stand ``where``. Raises ModelError if they are damaged."""
    try:
        return {float(key): Schedule.from_dict(fields) for key, fields in entry.get("schedules", {}).items()}
    except (AttributeError, ValueError) as error:
        raise ModelError(f"{where} holds no schedules by speed-up: {error}") from error


def speedup_key(speedup: float) -> str:
    """Speed-up as a key in JSON, in as few digits as identify it: ``3``, ``2.5``."""
    return str(float(speedup)).removesuffix(".0")


def untrained_warning(schedule: Schedule, trained: Mapping[float, Schedule]) -> str | None:
    """Warning of poor texts if a schedule skips layers that no training taught the model to skip; else None.

    A trained model gets one if it runs fewer layers, by a tenth, than every schedule that it was trained for.
    """
    depth = schedule.average_depth(schedule.horizon)
    least = min((each.average_depth(each.horizon) for each in trained.values()), default=schedule.num_layers)
    if schedule.is_full or (trained and depth >= 0.9 * least):
        return None
    what = f"to run fewer than {least:.3g} layers" if trained else "to skip layers"
    return (
        f"the model was not trained {what}: expect poor texts with {depth:.3g} of {schedule.num_layers} layers a step. "
        "`skipdecode probe` measures what each speed costs"
    )


def warn_untrained(schedule: Schedule, trained: Mapping[float, Schedule]) -> None:
    """Issue :func:`untrained_warning`, if there is one, as an UntrainedWarning."""
    if message := untrained_warning(schedule, trained):
        _warn(message)


@cache  # once per text: Python forgets which warnings it has issued whenever a filter changes, as torch does
def _warn(message: str) -> None:
    warnings.warn(message, UntrainedWarning, stacklevel=4)
