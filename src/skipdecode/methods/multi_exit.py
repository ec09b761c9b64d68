"""Multi-layer exit: the bottom layers run, and each exit is trained to be read (the paper's first baseline)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core.schedule import Schedule
from .base import Method

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from .objectives import Objective


class MultiExit(Method):
    """SkipDecode's depths, counted from the bottom; the loss is averaged over the exits after each layer."""

    name = "multi_exit"
    label = "multi-layer exit"
    order = "bottom"
    own_objective = True

    def is_trained_by(self, name: str) -> bool:
        """CALM is trained by the same loss."""
        return name in ("multi_exit", "calm")

    def objective(self, model: PreTrainedModel, schedules: Mapping[float, Schedule]) -> Objective | None:
        """Mean cross-entropy over all exits: no budget is favoured, and CALM may leave anywhere."""
        return _exits(model)


def _exits(model: PreTrainedModel) -> Objective:
    import torch

    from ..core.stack import decoder_layers
    from .exits import read_out
    from .objectives import Objective, token_loss

    count = len(decoder_layers(model))
    reader = read_out(model)

    class Exits(Objective):
        """All layers run on all columns, whatever was drawn: an exit at depth d only ever sees layers below d."""

        hidden_states = True
        schedule = Schedule.full(count)

        def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
            width = labels.shape[1] - 1
            early = [states[:, -width:] for states in outputs.hidden_states[1:count]]
            logits = [*map(reader, early), outputs.logits]
            return torch.stack([token_loss(exit, labels, num_items_in_batch) for exit in logits]).mean()

    return Exits()
