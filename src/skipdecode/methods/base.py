"""The form of a method: how it skips, what its training does differently, how it decodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..core.schedule import Schedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .objectives import Objective


class Method:
    """One way of running fewer layers. ``lengths`` are always the decode steps that batches really take."""

    name: str
    label: str
    #: Whether one checkpoint serves every budget; else each budget has a model of its own.
    shared = True

    def schedule(self, num_layers: int, speedup: float, lengths: Sequence[int]) -> Schedule:
        """The depths whose achieved layer ratio over ``lengths`` is as near to ``speedup`` as the method allows."""
        raise NotImplementedError

    def prepare(self, model: PreTrainedModel, speedup: float) -> PreTrainedModel:
        """The model to train, made from the one given."""
        return model

    def objective(self, model: PreTrainedModel, schedules: Mapping[float, Schedule]) -> Objective | None:
        """What training minimises; None for the response's cross-entropy."""
        return None
