"""How long own texts and an adapter will take on this machine, measured in seconds before hours of work begin."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core.schedule import Schedule
from ..data.tokenization import encode_prompts
from ..generation.generate import generate_ids
from ..weights.device import synchronize
from .learner import AdapterLearner
from .own_texts import SAMPLED

#: Decode steps that are timed, after one that is not.
STEPS = 8


def writing_seconds(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, new_tokens: int, batch_size: int
) -> float:
    """Return how long the model will take to write texts: those that end early take less.

    Args:
        model, tokenizer: as :func:`skipdecode.load` returns them.
        count: of texts.
        new_tokens: of each text.
        batch_size: texts written at a time.
    """
    prompts = encode_prompts(tokenizer, ["The"]) * min(batch_size, count)
    options: Any = SAMPLED | {"min_new_tokens": STEPS + 1, "max_new_tokens": STEPS + 1}
    cost = [generate_ids(model, tokenizer, prompts, None, batch_size, **options).cost for _ in range(2)][-1]
    return cost.decode_seconds / cost.steps * new_tokens * math.ceil(count / batch_size)


def learning_seconds(learner: AdapterLearner, schedules: Sequence[Schedule], batch: Mapping[str, Any]) -> float:
    """Return the seconds of one training step, which teaches all ``schedules``.

    Args:
        learner: the adapter in its model; gradients are added to the adapter's.
        schedules: that skip layers; none times full depth's pass alone.
        batch: as :class:`~skipdecode.data.collation.Collator` makes it.
    """
    start = time.perf_counter()
    full = learner.full_depth(batch)
    for schedule in schedules:
        learner(full, schedule).backward()
    synchronize(batch["input_ids"].device)
    return time.perf_counter() - start
