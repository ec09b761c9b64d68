"""The one place that decides which schedule applies to a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..core.checkpoint_config import (
    DEFAULT_HORIZON,
    DEFAULT_SPEEDUP,
    layer_count,
    schedules_of,
    style_of,
    trained_schedules,
)
from ..core.schedule import Schedule
from ..errors import ScheduleError
from .fitting import fit
from .planner import Predictor, plan


class Rule(Protocol):
    """What :func:`resolve_schedule` asks of a method; :class:`skipdecode.methods.Method` says what each means."""

    name: str
    order: str | None

    @property
    def takes_style(self) -> bool:
        """Whether horizon, order and decay can be set."""

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
    **style: Any,
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
        style: further fields of a new schedule: ``order``, ``decay``, ``warmup``, ….

    Raises:
        ScheduleError: the schedule does not fit the model, no schedule can be made from these values, the config's
            entry cannot be read, or the method takes no horizon and no form.
    """
    if schedule is not None:
        return schedule.check_layers(layer_count(config))
    layers = layer_count(config)
    if method is not None and not method.takes_style and (horizon is not None or style):
        raise ScheduleError(f"{method.name} has its own layer order and decay: no horizon or style can be set for it")
    trained = trained_schedules(config) if method is None else schedules_of(config, method.name)
    target = max(trained, default=DEFAULT_SPEEDUP) if speedup is None else speedup
    new = lengths is not None or horizon is not None or predictor is not None
    if target in trained and not new and set(style) <= {"prompt_layers"}:
        return trained[target].check_layers(layers).replace(**style)
    if not new and measure is not None:
        lengths = measure()
    if method is not None and method.order is None:
        if predictor is not None:
            raise ScheduleError(f"{method.name} has its own rule for depths: none can be planned on the clock")
        return method.schedule(layers, target, lengths or ())
    fastest = style_of(trained, layers)
    fields = {**({"order": method.order} if method else {}), **(fastest.style if fastest else {}), **style}
    if predictor is not None:
        return plan(predictor, target, **fields)
    if lengths is not None and horizon is None:
        return fit(layers, target, lengths, **fields)
    span = (fastest.horizon if fastest else DEFAULT_HORIZON) if horizon is None else horizon
    return Schedule.for_speedup(target, layers, span, **fields)
