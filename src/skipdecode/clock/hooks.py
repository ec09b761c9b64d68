"""Time the LM head inside a call of ``generate``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..weights.device import synchronize


@contextmanager
def timed_head(model: PreTrainedModel) -> Iterator[list[float]]:
    """Collect, inside, the seconds of each product with the vocabulary; of a model without a head, none."""
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
