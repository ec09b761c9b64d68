"""How far schedules are from full depth, on texts: the measure of probing, of training adapters and of searches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import kl_div, log_softmax
from transformers import PreTrainedModel

from ..data.metrics import draws
from ..errors import ModelError, UsageError
from ..model.teacher_forcing import PrefilledBatch
from ..schedule import Schedule


@dataclass(frozen=True)
class Damage:
    """Distance from full depth on the model's own texts.

    Attributes:
        kl: mean KL divergence of the next token's distribution from full depth's, in nats per token.
        agreement: share of positions whose most likely token is full depth's.
        interval: of ``kl``, 95%, by bootstrap over the texts, those of one prompt too; None of one text.
    """

    kl: float
    agreement: float
    interval: tuple[float, float] | None = None


@torch.no_grad()
def damage(
    passes: Iterable[PrefilledBatch],
    schedules: Sequence[Schedule],
    model: PreTrainedModel | None = None,
    on_pass: Callable[[], object] = lambda: None,
) -> list[Damage]:
    """Return the distance of each schedule from full depth over batches of texts, which run at full depth once.

    Args:
        passes: of the model that skips.
        schedules: its layers.
        model: whose full depth is meant, with gates attached; None: that of the model itself.
        on_pass: called after each pass of a schedule over a batch.

    Raises:
        UsageError: the texts have no position to measure.
        ModelError: logits are not finite.
    """
    divergence: list[list[float]] = [[] for _ in schedules]  # of each text, the sum over its positions
    same, lengths = [0] * len(schedules), list[int]()
    for each in passes:
        wanted, whole = each.counted, each if model is None else PrefilledBatch(model, each.batch)
        full = log_softmax(whole.logits()[wanted].float(), -1)
        best = full.argmax(-1)
        lengths += wanted.sum(1).tolist()
        text = wanted.nonzero()[:, 0]
        for index, schedule in enumerate(schedules):
            here = log_softmax(each.logits(schedule)[wanted].float(), -1)
            distances = kl_div(here, full, log_target=True, reduction="none").sum(-1)
            divergence[index] += distances.new_zeros(len(wanted)).index_add(0, text, distances).tolist()
            same[index] += int((here.argmax(-1) == best).sum())
            on_pass()
    if not (count := sum(lengths)):
        raise UsageError(
            "no text has a second token, or all are longer than the model's positions: nothing is measured"
        )
    if not np.isfinite(divergence).all():
        raise ModelError("the model's logits are not finite: a lower speed-up, or float32 or bfloat16, may help")
    found, sizes = [], np.array(lengths)
    drawn = draws(int((sizes > 0).sum()))
    for each, agreed in zip(np.array(divergence), same, strict=True):
        low, high = np.percentile(drawn @ each[sizes > 0] / (drawn @ sizes[sizes > 0]), (2.5, 97.5))
        interval = (float(low), float(high)) if drawn.shape[1] > 1 else None
        found.append(Damage(float(each.sum() / count), agreed / count, interval))
    return found
