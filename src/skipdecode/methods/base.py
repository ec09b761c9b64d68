"""The form of a method: how it skips, what its training does differently, how it decodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..core.checkpoint_config import DEFAULT_METHOD, UNTRAINED
from ..core.schedule import Schedule
from ..planning.fitting import fit
from ..planning.resolve import method_schedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .objectives import Objective


class Method:
    """One way of running fewer layers. ``lengths`` are always the decode steps that batches really take.

    What is particular to a method is said here, so that nobody has to ask for a method by its name.
    """

    name: str
    label: str
    #: Layer order of its schedules, whose depths and horizon are fitted; None: :meth:`schedule` has a rule of its own.
    order: str | None = None
    #: Whether it runs a schedule, which can be fitted to lengths as ``calibrate`` does.
    fits_depths = True
    #: Whether training reads the exit of every layer in every step, whatever budget is drawn.
    trains_exits = False
    #: Whether each speed-up needs a model of its own; else one checkpoint serves all.
    model_per_speedup = False

    @property
    def skips(self) -> bool:
        """Whether it leaves out layers of its model; else it always runs all that its model has."""
        return self.fits_depths or self.trains_exits

    @property
    def takes_style(self) -> bool:
        """Whether the user may set horizon, order and decay, or give a schedule; baselines follow their papers."""
        return self.name == DEFAULT_METHOD

    def is_trained_by(self, name: str) -> bool:
        """Whether a model trained by the method called ``name`` is trained for this method too."""
        return name == self.name

    def schedule(self, num_layers: int, speedup: float, lengths: Sequence[int]) -> Schedule:
        """The depths whose achieved layer ratio over ``lengths`` is as near to ``speedup`` as the method allows.

        Raises ScheduleError.
        """
        return fit(num_layers, speedup, lengths, order=self.order or "top")

    def prepare(self, model: PreTrainedModel, speedup: float) -> PreTrainedModel:
        """The model to train, made from the one given."""
        return model

    def objective(self, model: PreTrainedModel, schedules: Mapping[float, Schedule]) -> Objective | None:
        """What training minimises; None for the response's cross-entropy."""
        return None

    def decoding(
        self,
        model: PreTrainedModel,
        speedup: float,
        lengths: Callable[[], Sequence[int]],
        decode: Callable[[Any], Any],
        **options: Any,
    ) -> tuple[Schedule | Callable[[PreTrainedModel], Any] | None, dict[str, Any]]:
        """How to decode at ``speedup`` (as ``generate_ids`` takes it), and what about it belongs in a table.

        Args:
            model: as loaded.
            speedup: target.
            lengths: measures the full model's decode steps on held-out prompts.
            decode: writes texts for held-out prompts, decoding as told, and returns their cost.
            options: as ``model.generate`` will get them.
        """
        if not self.skips:
            return None, {}
        schedule = method_schedule(self, model.config, speedup, lengths)
        return schedule, {"schedule": schedule.to_dict()}


class SkipDecode(Method):
    """SkipDecode (Del Corro et al., 2023): depth falls with the position, lower and middle layers go first."""

    name = DEFAULT_METHOD
    label = "SkipDecode"
    order = "top"


class Full(Method):
    """The stock model, which the others are compared with: all layers at every step, whatever the target."""

    name = UNTRAINED
    label = "full model"
    fits_depths = False

    def is_trained_by(self, name: str) -> bool:
        """It needs no training."""
        return True

    def schedule(self, num_layers: int, speedup: float, lengths: Sequence[int]) -> Schedule:
        """The full schedule."""
        return Schedule.full(num_layers)
