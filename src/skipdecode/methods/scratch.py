"""A model of that few layers, trained from scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.checkpoint_config import layer_count
from ..core.decays import flat_depth
from .static import Static, init_pruned

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Scratch(Static):
    """As many layers as static pruning keeps, with random weights."""

    name = "scratch"
    label = "small model from scratch"

    def prepare(self, model: PreTrainedModel, speedup: float) -> PreTrainedModel:
        """A new small model; nothing of the given one but its form. At 1x, such a model itself, to train on."""
        if speedup == 1:
            return model
        count = layer_count(model.config)
        return init_pruned(model, range(flat_depth(speedup, count)))
