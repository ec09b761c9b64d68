"""The base class of methods (how each skips layers, trains and decodes), SkipDecode, and the full model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..latency.fitting import fit
from ..latency.resolve import method_schedule
from ..model.config import DEFAULT_METHOD, UNTRAINED
from ..schedule import Schedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Method:
    """A way of running fewer layers; other code asks its attributes, never its name.

    ``lengths`` are measured numbers of decode steps, one per batch.
    """

    name: str
    label: str
    #: Layer order of its fitted schedules; None: :meth:`schedule` sets order and depths itself.
    order: str | None = None
    #: Whether it runs a schedule, which ``calibrate`` can fit to lengths.
    fits_depths = True
    #: Whether every training step computes a loss from every layer's output, whatever schedule is drawn.
    trains_exits = False
    #: Whether each speed-up needs its own model; else one checkpoint serves all.
    model_per_speedup = False
    #: Whether the user may set horizon, order and decay, or a schedule; baselines follow their papers.
    takes_style = False
    #: Whether the user may at least set which layers run: their order and warm-up.
    takes_layers = False

    @property
    def skips(self) -> bool:
        """Tell whether the method skips layers of its model, by a schedule or by exits."""
        return self.fits_depths or self.trains_exits

    def is_trained_by(self, name: str) -> bool:
        """Return whether a model trained by the method called ``name`` also serves this method."""
        return name == self.name

    def schedule(self, num_layers: int, speedup: float, lengths: Sequence[int]) -> Schedule:
        """Return the schedule whose layer ratio over ``lengths`` is nearest to ``speedup``. Raises ScheduleError."""
        return fit(num_layers, speedup, lengths, order=self.order or "top")

    def prepare(self, model: PreTrainedModel, speedup: float, **layers: Any) -> PreTrainedModel:
        """Return the model to train: ``model`` itself, unless a subclass makes another of it for ``speedup``.

        ``layers``: ``order`` and ``warmup`` of a schedule, if they are not the defaults and the method takes them.
        """
        return model

    def decoding(
        self,
        model: PreTrainedModel,
        speedup: float,
        lengths: Callable[[], Sequence[int]],
        decode: Callable[[Any], Any],
    ) -> tuple[Schedule | Callable[[PreTrainedModel], Any] | None, dict[str, Any]]:
        """Return how to decode at ``speedup`` (an argument of ``generate_ids``), and details of it to report.

        Args:
            model: the loaded model.
            speedup: target.
            lengths: measures the full model's decode steps on held-out prompts.
            decode: generates texts for held-out prompts with the decoding it is given, and returns their cost.
        """
        if not self.skips:
            return None, {}
        schedule = method_schedule(self, model.config, speedup, lengths)
        return schedule, {"schedule": schedule.to_dict()}


class SkipDecode(Method):
    """SkipDecode (Del Corro et al., 2023): depth falls with the position; lower and middle layers are skipped first."""

    name = DEFAULT_METHOD
    label = "SkipDecode"
    order = "top"
    takes_style = True


class Full(Method):
    """The unchanged model, the reference of all methods: every step runs all layers, whatever the target."""

    name = UNTRAINED
    label = "full model"
    fits_depths = False

    def is_trained_by(self, name: str) -> bool:
        """Return True: the full model needs no training for skipping."""
        return True

    def schedule(self, num_layers: int, speedup: float, lengths: Sequence[int]) -> Schedule:
        """Return the schedule that runs all layers."""
        return Schedule.full(num_layers)


class MultiExit(SkipDecode):
    """Multi-layer exit: each step runs the lowest layers."""

    name = "multi_exit"
    label = "multi-layer exit"
    order = "bottom"
    trains_exits = True
    takes_style = False
