"""What notes times inside a call of ``generate``: of every pass, and of the head."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import LogitsProcessor, PreTrainedModel

from ..weights.device import synchronize


class Ticks(LogitsProcessor):
    """Notes when each forward pass has given its logits: ``generate`` calls it once a pass."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores (rows, vocabulary) as they are."""
        synchronize(scores.device)
        self.times.append(time.perf_counter())
        return scores


@contextmanager
def timed_head(model: PreTrainedModel) -> Iterator[list[float]]:
    """Inside, the seconds of each product with the vocabulary are collected; of a model without a head, none."""
    took: list[float] = []
    head = model.get_output_embeddings()

    def before(module: nn.Module, args: Any) -> None:
        synchronize(model.device)
        took.append(-time.perf_counter())

    def after(module: nn.Module, args: Any, output: Any) -> None:
        synchronize(model.device)
        took[-1] += time.perf_counter()

    hooks = [head.register_forward_pre_hook(before), head.register_forward_hook(after)] if head is not None else []
    try:
        yield took
    finally:
        for hook in hooks:
            hook.remove()
