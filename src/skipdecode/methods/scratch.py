"""A model of that few layers, trained from scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.shapes import flat_depth
from .static import Static, from_shrunk

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
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        return from_shrunk(model, range(flat_depth(speedup, count)))
