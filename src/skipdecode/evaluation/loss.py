"""Compute the teacher-forced loss of responses, with layers skipped as in decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core.attach import attach, teacher_forced
from ..core.schedule import Schedule
from ..data.collation import Collator, encode
from ..data.tasks import Example
from ..generation.generate import max_positions


def batches_of(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, batch_size: int
) -> list[dict[str, Any]]:
    """Return batches, on the model's device, of examples that fit its positions; first references are responses."""
    rows = encode(examples, tokenizer, max_positions(model.config) or 1 << 30)
    collate = Collator(tokenizer.pad_token_id, max_length=max_positions(model.config))
    return [
        {k: v.to(model.device) if isinstance(v, torch.Tensor) else v for k, v in collate(list(part)).items()}
        for part in (rows.select(range(i, min(i + batch_size, len(rows)))) for i in range(0, len(rows), batch_size))
    ]


@torch.no_grad()
def response_loss(model: PreTrainedModel, batches: Sequence[Mapping[str, Any]], schedule: Schedule) -> float:
    """Return the mean cross-entropy in nats per response token."""
    attach(model)
    total, count = 0.0, 0
    for batch in batches:
        labels = batch["labels"][:, 1:]
        with teacher_forced(model, schedule, batch["prompt_length"]):
            logits = model(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                position_ids=batch["position_ids"],
                logits_to_keep=labels.shape[1],
                use_cache=False,
            ).logits.float()
        losses = cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        total += sum(losses.sum(0).tolist())
        count += int((labels != -100).sum())
    return total / max(count, 1)
