"""What training an adapter minimises: the distance from the model's own full depth, on texts that the model wrote."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..data.collator import Collator
from ..loading.device import synchronize
from ..model.adapter import Adapter
from ..model.teacher_forcing import PrefilledBatch
from ..schedule import Schedule


class FullDepth(NamedTuple):
    """What full depth says of a batch of texts, for all schedules that learn from it."""

    passes: PrefilledBatch
    #: Probabilities of all tokens, (batch, R, vocabulary), and their entropies in nats, (batch, R).
    target: Tensor
    entropy: Tensor


class AdapterLearner(nn.Module):
    """What the Trainer trains and saves: the adapter alone. The model it acts in is no part of it.

    Args:
        model: the frozen causal LM, with gates and ``adapter`` attached.
        adapter: the adapter.
    """

    def __init__(self, model: nn.Module, adapter: Adapter) -> None:
        super().__init__()
        self.adapter = adapter
        for weight in adapter.parameters():  # biases stay as they are fitted: the optimizer, Muon, takes matrices alone
            weight.requires_grad_(weight.ndim == 2)
        self.config = model.config  # the Trainer reads it
        self._model = (model.eval().requires_grad_(False),)

    @property
    def model(self) -> nn.Module:
        """Return the frozen model."""
        return self._model[0]

    @torch.no_grad()
    def full_depth(self, batch: Mapping[str, Any]) -> FullDepth:
        """Run a batch at full depth, once for all schedules.

        The prompt's pass, which runs all layers, gives the first token of a text: nothing can be learnt from it.

        Args:
            batch: as :class:`~skipdecode.data.collator.Collator` makes it.
        """
        passes = PrefilledBatch(self.model, batch)
        logits = passes.logits().float()
        target = logits.softmax(-1)
        return FullDepth(passes, target, _cross_entropy(logits, target))

    def forward(self, full: FullDepth, schedule: Schedule, num_items_in_batch: Any = None) -> Tensor:
        """Return the mean KL divergence from full depth, in nats per text token.

        Args:
            full: of the batch to learn from.
            schedule: whose layers run.
            num_items_in_batch: tokens to divide the sum by; None: those of the batch.
        """
        logits = full.passes.logits(schedule).float()
        # Not kl_div, which copies the logits, hundreds of megabytes, more often.
        counted = full.passes.counted
        loss = (_cross_entropy(logits, full.target) - full.entropy)[counted].sum()
        return loss / (counted.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)

    def seconds(self, schedules: Sequence[Schedule], batch: Mapping[str, Any]) -> float:
        """Return the seconds of one training step, which teaches all ``schedules``; none times full depth alone.

        Gradients are added to the adapter's.
        """
        start = time.perf_counter()
        full = self.full_depth(batch)
        for schedule in schedules:
            self(full, schedule).backward()
        synchronize(batch["input_ids"].device)
        return time.perf_counter() - start


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), target.flatten(0, 1), reduction="none").view(target.shape[:2])


class TextCollator(Collator):
    """A collator that takes each text's first token, which the prompt's pass gives, out of the labels."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Make a batch as :class:`Collator` does; the Trainer counts only tokens that can be learnt from."""
        batch = super().__call__(rows)
        batch["labels"][:, 1] = -100
        return batch
