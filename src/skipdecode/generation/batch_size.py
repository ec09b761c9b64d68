"""``batch_size="auto"``: batch prompts of similar length, as many as fit into memory."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..errors import UsageError
from ..weights.memory import available_memory, mapped_bytes
from .options import num_beams
from .results import Cost

BatchSize = int | Literal["auto"]

#: The share of the free memory that a batch's tensors may take. Kernels' buffers and malloc need more: processes grew
#: by up to 1.44 times the size of their tensors (docs/memory.md).
SHARE = 0.6
#: Prompts in the first batch, which measures the memory that one prompt takes.
FIRST_ROWS = 4
#: Most prompts in a batch: a killed job loses one batch, and a batch runs until its longest text ends.
MOST_ROWS = 256


def check_batch_size(batch_size: BatchSize, options: Mapping[str, Any], defaults: GenerationConfig) -> None:
    """Check ``auto``. Raise UsageError if texts would depend on the batch, MissingExtra if psutil is not installed."""
    if batch_size != "auto":
        return
    if options.get("do_sample") and num_beams(options, defaults) > 1:
        raise UsageError("sampled beams are drawn for a batch as a whole: give batch_size as a number")
    available_memory("cpu")


class BatchSizes:
    """Chooses the number of prompts in each batch of a job.

    The first batch is small; its peak of tensor memory gives the bytes per position. Prompts are sorted longest first,
    so later prompts take no more per position. A batch that runs out of memory is halved.

    Args:
        budget: bytes for the tensors of a batch.
        new_tokens: the most new tokens of a text.
    """

    def __init__(self, budget: float, new_tokens: int) -> None:
        self.budget = budget
        self.new_tokens = new_tokens
        self.per_position: float | None = None  # bytes per position of a prompt or text, once measured
        self.most = FIRST_ROWS

    @classmethod
    def of(cls, model: PreTrainedModel, new_tokens: int) -> BatchSizes:
        """Return batch sizes for the memory that is free now. Raise MissingExtra if psutil is needed but missing."""
        # Memory-mapped weights are page cache, which counts as free; dropped pages would only be read again.
        kept = mapped_bytes() if model.device.type == "cpu" else 0
        return cls(SHARE * available_memory(model.device, kept=kept), new_tokens)

    def next(self, lengths: Sequence[int], at: int) -> int:
        """Return how many prompts to decode together from index ``at``; ``lengths`` are in tokens, longest first."""
        longest = lengths[at]
        like = (
            bisect_left(lengths, -longest / 2, lo=at, key=lambda length: -length) - at
        )  # at most half of a prompt is padding
        fit = self.most
        if self.per_position is not None:
            fit = max(min(fit, int(self.budget / max(self.per_position * (longest + self.new_tokens), 1))), 1)
        return math.ceil(like / math.ceil(like / fit))  # equal batches, without a small last one

    def measured(self, peak: int, width: int, cost: Cost) -> None:
        """Store the ``peak`` bytes of the first batch, whose prompts were padded to ``width`` tokens."""
        self.per_position = peak / cost.rows / (width + cost.steps + 1)
        self.most = MOST_ROWS

    def halve(self, rows: int) -> None:
        """Limit the next batches to half of ``rows`` prompts, since ``rows`` did not fit."""
        self.most = max(rows // 2, 1)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether ``error`` says that a device or the CPU ran out of memory."""
    words = "DefaultCPUAllocator", "MPS backend out of memory"
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(word in str(error) for word in words)
