"""Fit a schedule to what the model writes with it, until the texts achieve a ratio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core.schedule import Schedule
from ..data.chat import Prompt
from ..data.tokenization import encode_prompts
from ..generation.generate import generate_ids
from ..generation.results import Cost
from ..planning.fitting import Lengths, Measure

#: How far the achieved ratio may be off, as a share of the target.
TOLERANCE = 0.03
#: How many fitted schedules are tried at most.
ROUNDS = 3


@dataclass(frozen=True)
class Written:
    """What a model wrote with a schedule.

    Attributes:
        schedule: the one it wrote with.
        ratio: what was fitted to the target; over its own lengths, times less than at full depth.
        step_layer_ratio: the full model's layers divided by those that a decode step ran.
        job_layer_ratio: the same over the whole job, the prompt's positions and the decode steps.
        lengths: decode steps of each batch.
        texts: in the order of the prompts.
    """

    schedule: Schedule
    ratio: float
    step_layer_ratio: float
    job_layer_ratio: float
    lengths: tuple[int, ...]
    texts: tuple[str, ...]

    def ratios(self) -> dict[str, float]:
        """The layer ratios, as JSON has them."""
        return {name: round(getattr(self, name), 3) for name in ("step_layer_ratio", "job_layer_ratio")}


def achieve(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    with_lenders_first: Callable[[Sequence[int]], Schedule],
    speedup: float,
    before: Schedule,
    measure: Callable[[Sequence[int]], Measure] = Lengths,
    *,
    keep: bool = False,
    batch_size: int = 32,
    on_rows: Callable[[int, int], object] = lambda done, total: None,
    **options: Any,
) -> tuple[Written, Written, Written]:
    """Write the prompts, fit to the lengths, write again. Of several fitted schedules the nearest one counts.

    Args:
        model, tokenizer: as loaded.
        prompts: like those the schedule will meet; batches are made of similar lengths.
        fitted: lengths -> schedule.
        speedup: the ratio wanted.
        before: what the model is decoded with now.
        measure: lengths -> what ``speedup`` is a ratio of.
        keep: ``before`` is the answer if it is near enough, so that nothing trained is moved without need.
        batch_size: lengths are those of whole batches, so it matters.
        on_rows: called with the number of texts written, and of texts to write in all if the first fit is near enough.
        options: as ``model.generate`` names them.

    Returns:
        What was written with ``before``, with the fitted schedule, and at full depth.
    """
    ids = encode_prompts(tokenizer, prompts)
    texts_of: dict[Schedule, Written] = {}
    rows = 0

    def count(cost: Cost) -> None:
        nonlocal rows
        rows += cost.rows
        on_rows(rows, max(3 * len(prompts), rows))

    def write(schedule: Schedule) -> Written:
        if schedule not in texts_of:
            result = generate_ids(model, tokenizer, ids, schedule, batch_size, count, **options)
            texts = tuple(" ".join(completion.text.split()) for completion in result.completions)
            ratio = measure(result.lengths).ratio(schedule) if sum(result.lengths) else 1.0
            cost = result.cost
            layers = cost.layer_ratio, cost.num_layers / cost.job_depth
            texts_of[schedule] = Written(schedule, ratio, *layers, tuple(result.lengths), texts)
        return texts_of[schedule]

    def off(written: Written) -> float:
        return abs(written.ratio / speedup - 1)

    full, old = write(Schedule.full(before.num_layers)), write(before)
    if keep and off(old) <= TOLERANCE:
        return old, old, full
    new = [write(with_lenders_first(full.lengths))]
    while len(new) < ROUNDS and off(new[-1]) > TOLERANCE:
        schedule = with_lenders_first(new[-1].lengths)
        if schedule in [each.schedule for each in new]:
            break  # it would write the same again
        new.append(write(schedule))
    return old, min(new, key=off), full
