"""What training an adapter minimises: the distance from the model's own full depth, on texts that the model wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..core.adapter import Adapter
from ..core.schedule import Schedule
from ..core.stack import decoder_layers
from ..core.text_passes import TextPasses
from ..data.collation import Collator
from .hidden import hidden_states


class FullDepth(NamedTuple):
    """What full depth says of a batch of texts, for all schedules that learn from it."""

    passes: TextPasses
    #: Positions that can be learnt from, (batch, R).
    learned: Tensor
    #: Probabilities of all tokens, (batch, R, vocabulary), and their entropies in nats, (batch, R).
    target: Tensor
    entropy: Tensor
    #: By layer, what each position is given, (batch, R, size).
    hidden: Mapping[int, Tensor]


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
    def full_depth(self, batch: Mapping[str, Any], schedules: Iterable[Schedule]) -> FullDepth:
        """Run a batch at full depth, once for all schedules.

        The prompt's pass, which runs all layers, gives the first token of a text: nothing can be learnt from it.

        Args:
            batch: as :class:`~skipdecode.data.collation.Collator` makes it.
            schedules: those that will learn from it.
        """
        learned = batch["labels"][:, 2:] != -100
        passes = TextPasses(self.model, batch)
        places = {layer + 1 for each in schedules for layer in corrected_positions(each, learned)}
        with hidden_states(passes, places) as hidden:
            logits = passes.logits(Schedule.full(len(decoder_layers(self.model)))).float()
        target = logits.softmax(-1)
        return FullDepth(passes, learned, target, _cross_entropy(logits, target), hidden)

    def forward(self, full: FullDepth, schedule: Schedule, num_items_in_batch: Any = None) -> Tensor:
        """Return the mean KL divergence from full depth, in nats per text token.

        In training, :func:`hidden_error` is added: the hidden states say what is wrong layer by layer.

        Args:
            full: of the batch to learn from.
            schedule: whose layers run.
            num_items_in_batch: tokens to divide the sum by; None: those of the batch.
        """
        corrected = corrected_positions(schedule, full.learned) if self.training else {}
        with hidden_states(full.passes, [layer + 1 for layer in corrected]) as here:
            logits = full.passes.logits(schedule).float()
        # Not kl_div, which copies the logits, hundreds of megabytes, more often.
        loss = (_cross_entropy(logits, full.target) - full.entropy)[full.learned].sum()
        for layer, where in corrected.items():
            loss = loss + hidden_error(here[layer + 1][where], full.hidden[layer + 1][where]) / len(corrected)
        return loss / (full.learned.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), target.flatten(0, 1), reduction="none").view(target.shape[:2])


def corrected_positions(schedule: Schedule, learned: Tensor) -> dict[int, Tensor]:
    """Return, by each layer that runs above skipped ones, which of the positions ``learned``, (batch, R), it runs."""
    found: dict[int, Tensor] = {}
    for step in range(learned.shape[1]):
        layers = schedule.layers(schedule.depth(step))
        for layer in layers[next((i for i, each in enumerate(layers) if each > i), len(layers)) :]:
            found.setdefault(layer, torch.zeros_like(learned))[:, step] = learned[:, step]
    return {layer: where for layer, where in found.items() if where.any()}


def hidden_error(here: Tensor, full: Tensor) -> Tensor:
    """Return the sum over tokens of the mean squared error of hidden states (tokens, size), in units of their variance.

    A token counts as 10 at most: a few tokens have hidden states far larger than all others.
    """
    full = full.float()
    scale = full.var(0, correction=0) + 1e-6 * full.square().mean()
    return ((here.float() - full).square() / scale).mean(-1).clamp(max=10).sum()


class TextCollator(Collator):
    """A collator that takes each text's first token, which the prompt's pass gives, out of the labels."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Make a batch as :class:`Collator` does; the Trainer counts only tokens that can be learnt from."""
        batch = super().__call__(rows)
        batch["labels"][:, 1] = -100
        return batch
