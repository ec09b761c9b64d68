"""Fit a schedule to a model and its data: lengths that it really writes, layers that it can really spare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .fitting import achieved
from .generation import Plan, generate_ids
from .losses import loss_by_position
from .prompts import encode_prompts
from .schedule import Schedule
from .stack import decoder_layers


@dataclass(frozen=True)
class LayerRanking:
    """``order``: all layers, those that the model can least spare first; ``losses``: nats, the last at full depth,
    the one before it with a layer less, and so on."""

    order: tuple[int, ...]
    losses: tuple[float, ...]


def rank_layers(
    model: PreTrainedModel,
    batches: Sequence[Mapping[str, Any]],
    warmup: int = 1,
    on_trial: Callable[[], object] | None = None,
) -> LayerRanking:
    """Greedy: of the layers left, drop the one without which the loss on ``batches`` is least, until one is left.

    The prompt keeps all layers, as in decoding. It costs about ``L**2 / 2`` passes over the batches.

    Args:
        model: with gates or without.
        batches: as :func:`skipdecode.losses.batches_of` makes them.
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


@dataclass(frozen=True)
class Calibration:
    """A fitted schedule; the layer ratio it achieved when its model wrote with it, and those batches' decode steps."""

    schedule: Schedule
    layer_ratio: float
    lengths: tuple[int, ...]


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    fit: Callable[[Sequence[int]], Schedule],
    speedup: float,
    *,
    batch_size: int = 32,
    tolerance: float = 0.03,
    rounds: int = 4,
    on_batch: Callable[[Any], object] | None = None,
    **options: Any,
) -> Calibration:
    """Write the prompts, fit to the lengths, write again: until what is written achieves ``speedup``.

    Args:
        model, tokenizer: as loaded.
        prompts: like those the schedule will meet; batches are made of similar lengths.
        fit: lengths -> schedule, :func:`skipdecode.fitting.fit` with its first arguments bound.
        speedup: the layer ratio wanted.
        batch_size: lengths are those of whole batches, so it matters.
        tolerance: how far the achieved ratio may be off.
        rounds: how often it may write at most. The best round counts.
        on_batch: is told each batch's cost.
        options: as ``model.generate`` names them.
    """
    ids = encode_prompts(tokenizer, prompts)
    plan: Plan = None
    lengths: Sequence[int] = ()
    best: Calibration | None = None
    for _ in range(rounds):
        result = generate_ids(model, tokenizer, ids, plan, batch_size, on_batch, **options)
        lengths = result.lengths
        if isinstance(plan, Schedule):
            found = Calibration(plan, achieved(plan, lengths), tuple(lengths))
            if best is None or abs(found.layer_ratio / speedup - 1) < abs(best.layer_ratio / speedup - 1):
                best = found
            if abs(found.layer_ratio / speedup - 1) <= tolerance:
                return found
        plan = fit(lengths)
    if best is None:
        raise ValueError("at least two rounds are needed: one to learn the lengths, one to check")
    return best
