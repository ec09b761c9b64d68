"""Make new schedules for a model, fitted to lengths or planned on a clock, with fields of the config's schedules.

:func:`skipdecode.model.config.schedule_for` decides which of the config's schedules applies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..errors import ScheduleError
from ..model.config import DEFAULT_SPEEDUP, config_schedules, num_layers, schedules_of, style_of
from ..schedule import Schedule
from .fitting import fit
from .old_planner import Predictor, plan


class Rule(Protocol):
    """What this module needs of a method; :class:`skipdecode.evaluation.methods.Method` documents each member."""

    name: str
    order: str | None
    takes_style: bool

    def schedule(self, num_layers: int, speedup: float, lengths: Sequence[int]) -> Schedule:
        """Return the method's schedule for this speed-up over batches of ``lengths`` decode steps."""


def new_schedule(
    config: Any,
    speedup: float | None,
    basis: Sequence[int] | Predictor,
    *,
    method: Rule | None = None,
    horizon: int | None = None,
    **style: Any,
) -> Schedule:
    """Make a new schedule with the order, decay and further fields of the config's fastest schedule.

    Args:
        config: the model's transformers config.
        speedup: target, 1 to the number of layers. None: the config's fastest, else 2.
        basis: decode steps of each batch, for a speed-up in layers; or a predictor, for a speed-up in seconds.
        method: whose rule to follow, and whose schedules in the config to take fields from; None: any schedules.
        horizon: steps over which the paper's budget falls, instead of a fit to ``basis``.
        style: fields to set: ``order``, ``decay``, ``warmup``, ….

    Raises:
        ScheduleError: no schedule can be made from these values, or the method does not allow them.
    """
    layers = num_layers(config)
    known = config_schedules(config) if method is None else schedules_of(config, method.name)
    target = max(known, default=DEFAULT_SPEEDUP) if speedup is None else speedup
    if method is not None and not method.takes_style and (horizon is not None or style):
        raise ScheduleError(f"{method.name} has its own layer order and decay: no horizon or style can be set for it")
    if method is not None and method.order is None:
        if isinstance(basis, Predictor):
            raise ScheduleError(f"{method.name} has its own rule for depths: none can be planned on the clock")
        return method.schedule(layers, target, basis)
    fields = ({} if method is None else {"order": method.order}) | style_of(known, layers)[1] | style
    if horizon is not None:
        return Schedule.for_speedup(target, layers, horizon, **fields)
    if isinstance(basis, Predictor):
        return plan(basis, target, **fields)
    return fit(layers, target, basis, **fields)


def method_schedule(
    method: Rule, config: Any, speedup: float, measure: Callable[[], Sequence[int]], **style: Any
) -> Schedule:
    """Return the config's schedule for this method and speed-up, else fit a new one to the lengths from ``measure``.

    Any field in ``style``, except ``prompt_layers`` alone, means a new one. Only for a new one is ``measure`` called,
    which returns the decode steps of each batch. Raises ScheduleError as :func:`new_schedule` does.
    """
    known = schedules_of(config, method.name)
    if speedup in known and set(style) <= ({"prompt_layers"} if method.takes_style else set()):
        return known[speedup].replace(**style)
    return new_schedule(config, speedup, measure(), method=method, **style)
