"""Which layers a model can spare: a ranking found greedily from the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..core.schedule import Schedule
from ..core.stack import decoder_layers
from .loss import loss_by_position


@dataclass(frozen=True)
class LayerRanking:
    """A layer order and what it costs.

    Attributes:
        order: all layers, from the most to the least important.
        losses: ``losses[i]`` is the loss in nats per token with the ``i + 1`` most important layers.
    """

    order: tuple[int, ...]
    losses: tuple[float, ...]


def rank_layers(
    model: PreTrainedModel,
    batches: Sequence[Mapping[str, Any]],
    warmup: int = 1,
    on_trial: Callable[[], object] | None = None,
) -> LayerRanking:
    """Drop layers one by one, each time the one whose removal raises the loss on ``batches`` least, until one is left.

    The prompt keeps all layers, as in decoding. The search costs about ``L**2 / 2`` passes over the batches.

    Args:
        model: with gates or without.
        batches: as :func:`skipdecode.evaluation.loss.batches_of` makes them.
        warmup: bottom layers that are never candidates.
        on_trial: called after each pass.
    """
    count = len(decoder_layers(model))
    left = list(range(count))
    full = loss_by_position(model, batches, Schedule.full(count))[0]
    dropped: list[int] = []
    losses = [full]
    while len(left) > max(warmup, 1):
        trials = {}
        for layer in left[warmup:]:
            order = (*(i for i in left if i != layer), layer, *reversed(dropped))
            depth = len(left) - 1
            schedule = Schedule(count, depth, depth, horizon=1, decay="constant", order=order)
            trials[layer] = loss_by_position(model, batches, schedule)[0]
            if on_trial:
                on_trial()
        best = min(trials, key=lambda layer: trials[layer])
        left.remove(best)
        dropped.append(best)
        losses.append(trials[best])
    return LayerRanking((*left, *reversed(dropped)), tuple(reversed(losses)))


def trials(num_layers: int, warmup: int = 1) -> int:
    """How many passes :func:`rank_layers` makes after the first."""
    return sum(n - warmup for n in range(max(warmup, 1) + 1, num_layers + 1))
