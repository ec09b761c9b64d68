"""Divergence of schedules from the full model on given texts, and the loss of texts under the full model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.chat import Prompt
from ..data.collator import batches, encoded
from ..data.metrics import draws
from ..data.tasks import Example
from ..errors import NOT_FINITE, ModelError, UsageError
from ..generation.batches import position_limit
from ..generation.stats import Completion
from ..model.teacher_forcing import PrefilledBatch
from ..schedule import Schedule


@dataclass(frozen=True)
class Divergence:
    """Distance of next-token distributions from the full model's."""

    kl: float  #: Mean KL divergence from the full model, in nats per token.
    top1: float  #: Share of positions with the full model's most likely token, 0 to 1.
    interval: tuple[float, float] | None = None  #: 95%, of ``kl``, by bootstrap over ten texts or more.


@torch.no_grad()
def divergence(
    prefilled: Iterable[PrefilledBatch],
    schedules: Sequence[Schedule],
    full: PreTrainedModel | None = None,
) -> list[Divergence]:
    """Divergence of each schedule from the full model, over the texts of ``prefilled``.

    ``full`` has gates attached; None: the skipping model itself at full depth.
    Raises UsageError if no text has a second token, ModelError if logits are not finite.
    """
    sums: list[list[float]] = [[] for _ in schedules]  # of KL over the positions of each text
    agreeing = [0] * len(schedules)
    lengths: list[int] = []
    for batch in prefilled:
        counted = batch.counted
        reference = batch if full is None else PrefilledBatch(full, batch.batch)
        expected = log_softmax(reference.logits()[counted].float(), -1)
        likeliest = expected.argmax(-1)
        lengths += counted.sum(1).tolist()
        text = counted.nonzero()[:, 0]
        for index, schedule in enumerate(schedules):
            found = log_softmax(batch.logits(schedule)[counted].float(), -1)
            distances = kl_div(found, expected, log_target=True, reduction="none").sum(-1)
            sums[index] += distances.new_zeros(len(counted)).index_add(0, text, distances).tolist()
            agreeing[index] += int((found.argmax(-1) == likeliest).sum())
    if not sum(lengths):
        raise UsageError("no text has a second token that fits the model: there is nothing to measure")
    if not np.isfinite(sums).all():
        raise ModelError(NOT_FINITE)
    sizes = np.array(lengths)
    measured = sizes > 0
    samples = draws(int(measured.sum()))
    result = []
    for text_sums, same in zip(np.array(sums), agreeing, strict=True):
        low, high = np.percentile(samples @ text_sums[measured] / (samples @ sizes[measured]), (2.5, 97.5))
        interval = (float(low), float(high)) if samples.shape[1] >= 10 else None
        result.append(Divergence(float(text_sums.sum() / sizes.sum()), same / int(sizes.sum()), interval))
    return result


@torch.no_grad()
def loss_under(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    batch_size: int,
) -> float:
    """Loss of generated texts under the full model, in nats per token; a text's end counts if it has one.

    Raises ModelError if the loss is not finite.
    """
    pairs = zip(prompts, completions, strict=True)
    examples = [Example(prompt, (each.text,), each.finish_reason == "length") for prompt, each in pairs]
    rows = encoded(examples, tokenizer, as_written=True)
    total = 0.0
    count = 0
    for batch in batches(rows, tokenizer, batch_size, position_limit(model.config), model.device):
        labels = batch["labels"][:, 1:]
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
        logits = model(**inputs, logits_to_keep=labels.shape[1], use_cache=False).logits.float()
        total += float(cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="sum"))
        count += int((labels != -100).sum())
    if not np.isfinite(total):
        raise ModelError(NOT_FINITE)
    return total / max(count, 1)
