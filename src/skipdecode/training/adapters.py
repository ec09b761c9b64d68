"""Train an adapter: the model is frozen; its own full depth is what the adapter learns, on texts of the model's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax

from ..core.adapter import Adapter
from ..core.schedule import Schedule
from ..core.text_passes import TextPasses
from .trainer import SkipTrainer


class AdapterLearner(nn.Module):
    """What the Trainer trains and saves: the adapter alone. The model it acts in is no part of it.

    Args:
        model: the frozen causal LM, with gates and ``adapter`` attached.
        adapter: the adapter.
    """

    def __init__(self, model: nn.Module, adapter: Adapter) -> None:
        super().__init__()
        self.adapter = adapter.float().requires_grad_(True)
        self.config = model.config  # the Trainer reads it
        self._model = (model.eval().requires_grad_(False),)

    def forward(self, batch: Mapping[str, Any], schedule: Schedule, num_items_in_batch: Any = None) -> Tensor:
        """Return the mean KL divergence from full depth, in nats per text token.

        The prompt's pass, which runs all layers, gives the first token of a text: nothing can be learnt from it.

        Args:
            batch: as :class:`~skipdecode.data.collation.Collator` makes it.
            schedule: whose layers run.
            num_items_in_batch: tokens to divide the sum by; None: those of ``batch``.
        """
        learned = batch["labels"][:, 2:] != -100
        passes = TextPasses(self._model[0], batch)
        with torch.no_grad():
            target = log_softmax(passes.logits(Schedule.full(schedule.num_layers))[learned].float(), -1)
        student = log_softmax(passes.logits(schedule)[learned].float(), -1)
        count = learned.sum() if num_items_in_batch is None else num_items_in_batch
        return kl_div(student, target, log_target=True, reduction="sum") / count


class AdapterTrainer(SkipTrainer):
    """Trains an :class:`AdapterLearner`; evaluation reports its KL divergence at each speed-up."""

    def _attach(self) -> None:
        """Do nothing: the learner's model has gates."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute the distance from full depth at the schedule of the step, or of the evaluation."""
        loss = model(inputs, self._evaluated or self._drawn(), num_items_in_batch)
        return (loss, {"loss": loss}) if return_outputs else loss


def without_first(batch: dict[str, Any]) -> dict[str, Any]:
    """Take each text's first token, which the prompt's pass gives, out of the labels that the Trainer counts."""
    batch["labels"][:, 1] = -100
    return batch
