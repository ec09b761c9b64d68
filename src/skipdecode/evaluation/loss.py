"""The loss of responses with layers skipped, and of texts at full depth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.chat import Prompt
from ..data.collator import batches, encoded
from ..data.tasks import Example
from ..errors import ModelError
from ..generation.generate import position_limit
from ..generation.stats import Completion
from ..model.attach import attach, teacher_forced
from ..model.inspect import decoder_layers
from ..schedule import Schedule


@torch.no_grad()
def response_loss(model: PreTrainedModel, texts: Sequence[Mapping[str, Any]], schedule: Schedule) -> float:
    """Return the mean cross-entropy in nats per response token, with layers skipped as ``schedule`` says.

    Raises ModelError if it is not finite, or there is no response token.
    """
    attach(model)
    total, count = 0.0, 0
    for batch in texts:
        labels = batch["labels"][:, 1:]
        with teacher_forced(model, schedule, batch["prompt_length"]):
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
            logits = model(**inputs, logits_to_keep=labels.shape[1], use_cache=False).logits.float()
        losses = cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        total += sum(losses.sum(0).tolist())
        count += int((labels != -100).sum())
    if not math.isfinite(total):
        raise ModelError("the model's logits are not finite: a lower speed-up, or float32 or bfloat16, may help")
    if not count:
        raise ModelError("no response has a token that could be measured")
    return total / count


def text_loss(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[tuple[Prompt, Completion]], size: int
) -> float:
    """Return how unlikely texts are to a model at full depth, in nats per token: the logarithm of their perplexity.

    Args:
        model: with all its layers.
        texts: with their prompts; the end of a text counts if it has one.
        size: of a batch.
    """
    examples = [Example(prompt, (each.text,), each.finish_reason == "length") for prompt, each in texts]
    rows = encoded(examples, tokenizer, as_written=True)
    full = Schedule.full(len(decoder_layers(model)))
    return response_loss(model, batches(rows, tokenizer, size, position_limit(model.config), model.device), full)
