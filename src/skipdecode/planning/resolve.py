"""New schedules for a model: fitted to lengths or planned on a machine's clock, in the style of its own schedules.

Which of its own schedules applies, :func:`skipdecode.core.checkpoint_config.schedule_for` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..core.checkpoint_config import DEFAULT_SPEEDUP, layer_count, schedules_of, style_of, trained_schedules
from ..core.schedule import Schedule
from ..errors import ScheduleError
from .fitting import fit
from .planner import Predictor, plan


class Rule(Protocol):
    """What is asked of a method here; :class:`skipdecode.methods.Method` says what each means."""

    name: str
    order: str | None

    @property
    def takes_style(self) -> bool:
        """Whether horizon, order and decay can be set."""

    def schedule(self, num_layers: int, speedup: float, lengths: Sequence[int]) -> Schedule:
        """The method's schedule for this speed-up over these lengths."""


def new_schedule(
    config: Any,
    speedup: float | None,
    basis: Sequence[int] | Predictor,
    *,
    method: Rule | None = None,
    horizon: int | None = None,
    **style: Any,
) -> Schedule:
    """A new schedule, in the style of the fastest one that the config has.

    Args:
        config: the model's, as transformers reads it.
        speedup: target, 1 to the number of layers. None: the fastest of the config, else 2.
        basis: decode steps of each batch, over which ``speedup`` is a ratio of layers; or what predicts a machine's
            seconds for the batches to come, of which ``speedup`` is then a ratio.
        method: only schedules that the config has for this method give their style, and its order and rule hold.
        horizon: steps over which the paper's budget falls, in place of a fit to the lengths.
        style: further fields: ``order``, ``decay``, ``warmup``, ….

    Raises:
        ScheduleError: no schedule can be made from these values, or the method has its own rule for them.
    """
    layers = layer_count(config)
    known = trained_schedules(config) if method is None else schedules_of(config, method.name)
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
    """The config's own schedule for this method and speed-up; else a new one, fitted to what ``measure`` returns.

    ``measure`` is called only if it is needed. A style (but ``prompt_layers`` alone, which leaves the depths) always
    means a new one. Raises ScheduleError as :func:`new_schedule` does.
    """
    known = schedules_of(config, method.name)
    if speedup in known and set(style) <= ({"prompt_layers"} if method.takes_style else set()):
        return known[speedup].check_layers(layer_count(config)).replace(**style)
    return new_schedule(config, speedup, measure(), method=method, **style)
