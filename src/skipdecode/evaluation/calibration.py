"""Fit a schedule to a model and its data: lengths that it really writes, layers that it can really spare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core.fitting import achieved
from ..core.schedule import Schedule
from ..core.stack import decoder_layers
from ..data.chat import Prompt
from ..data.metrics import DEFAULT, Agreement
from ..data.tokenization import encode_prompts
from ..errors import UsageError
from ..generation.generate import generate_ids
from .loss import loss_by_position

#: How far a score may fall by calibration before it is not saved unasked.
POINTS = 1.0


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


@dataclass(frozen=True)
class Written:
    """What a model wrote with a schedule: the layer ratio it achieved, decode steps of each batch, texts in order."""

    schedule: Schedule
    layer_ratio: float
    lengths: tuple[int, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Calibration:
    """What was written before and after, and by the full model."""

    before: Written
    after: Written
    full: Written

    @property
    def schedule(self) -> Schedule:
        """The fitted one."""
        return self.after.schedule

    def quality(self, references: Sequence[Sequence[str]]) -> dict[str, Quality]:
        """Each score by its label: of the rows that have references, and everyone's agreement with full depth.

        Args:
            references: of each row, in the order of the prompts; none where there are none.
        """
        scored = [i for i, texts in enumerate(references) if texts]
        found = {}
        for metric in DEFAULT if scored else ():
            found[metric.label] = Quality(
                *(
                    metric.score([each.texts[i] for i in scored], [references[i] for i in scored])
                    for each in (self.full, self.before, self.after)
                )
            )
        full = [[text] for text in self.full.texts]
        agreed = (Agreement().score(each.texts, full) for each in (self.full, self.before, self.after))
        return found | {"agreement with full depth": Quality(*agreed)}


@dataclass(frozen=True)
class Quality:
    """One score, 0 to 100, of the full model, of the schedule there was, and of the fitted one."""

    full: float
    before: float
    after: float


def fallen(quality: Mapping[str, Quality]) -> dict[str, Quality]:
    """Scores that fell by more than POINTS; where there are scores against references, agreement does not count."""
    judged = list(quality)[: max(len(quality) - 1, 1)]
    return {label: quality[label] for label in judged if quality[label].before - quality[label].after > POINTS}


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    fit: Callable[[Sequence[int]], Schedule],
    speedup: float,
    before: Schedule,
    *,
    keep: bool = False,
    batch_size: int = 32,
    tolerance: float = 0.03,
    rounds: int = 3,
    on_batch: Callable[[Any], object] | None = None,
    **options: Any,
) -> Calibration:
    """Write the prompts, fit to the lengths, write again: until what is written achieves ``speedup``.

    Args:
        model, tokenizer: as loaded.
        prompts: like those the schedule will meet; batches are made of similar lengths.
        fit: lengths -> schedule: :func:`skipdecode.core.fitting.fit` or ``refit`` with the other arguments bound.
        speedup: the layer ratio wanted.
        before: what the model is decoded with now; its texts stand beside those of the fitted schedule.
        keep: ``before`` is the answer if it is near enough: what was trained is not moved without need.
        batch_size: lengths are those of whole batches, so it matters.
        tolerance: how far the achieved ratio may be off.
        rounds: how many fitted schedules it may write with at most. The best one counts.
        on_batch: is told each batch's cost.
        options: as ``model.generate`` names them.

    Raises:
        UsageError: no round at all, or no prompts.
    """
    if rounds < 1 or not prompts:
        raise UsageError("calibration needs prompts, and at least one round")
    ids = encode_prompts(tokenizer, prompts)
    tried: dict[Schedule, Written] = {}

    def write(schedule: Schedule) -> Written:
        if schedule not in tried:
            result = generate_ids(model, tokenizer, ids, schedule, batch_size, on_batch, **options)
            texts = tuple(" ".join(row.text.split()) for row in result.completions)
            ratio = achieved(schedule, result.lengths) if sum(result.lengths) else 1.0
            tried[schedule] = Written(schedule, ratio, tuple(result.lengths), texts)
        return tried[schedule]

    def off(written: Written) -> float:
        return abs(written.layer_ratio / speedup - 1)

    full, old = write(Schedule.full(before.num_layers)), write(before)
    if keep and off(old) <= tolerance:
        return Calibration(old, old, full)
    found: list[Written] = []
    last = full
    for _ in range(rounds):
        schedule = fit(last.lengths)
        if schedule in [each.schedule for each in found]:
            break  # it would write the same again
        last = write(schedule)
        found.append(last)
        if off(last) <= tolerance:
            break
    return Calibration(old, min(found, key=off), full)
