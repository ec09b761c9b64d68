"""``batch_size="auto"``: rows of like length, as many at once as fit into memory."""

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

#: The share of the free memory that a batch's tensors may take. Buffers of kernels and what malloc keeps come on top:
#: processes grew by up to 1.44 times what their tensors take (docs/memory.md).
SHARE = 0.6
#: Rows of the first batch, in which it is measured what a row takes.
FIRST_ROWS = 4
#: The most rows at once: a job that is killed loses a batch, and a batch goes on for its longest text.
MOST_ROWS = 256


def check_batch_size(batch_size: BatchSize, options: Mapping[str, Any], defaults: GenerationConfig) -> None:
    """Raises UsageError for ``auto`` where a text would depend on it, MissingExtra where memory cannot be told."""
    if batch_size != "auto":
        return
    if options.get("do_sample") and num_beams(options, defaults) > 1:
        raise UsageError("sampled beams are drawn for a batch as a whole: give batch_size as a number")
    available_memory("cpu")


class BatchSizes:
    """How many rows each batch of a job takes.

    The first batch is small, and the most that its tensors take at once is measured. Prompts come longest first, so
    that no row after it takes more per position. A batch that does not fit after all is halved.

    Args:
        budget: bytes for the tensors of a batch.
        new_tokens: that a text has at most.
    """

    def __init__(self, budget: float, new_tokens: int) -> None:
        self.budget = budget
        self.new_tokens = new_tokens
        self.per_position: float | None = None  # bytes that a position of a row takes, once measured
        self.most = FIRST_ROWS

    @classmethod
    def of(cls, model: PreTrainedModel, new_tokens: int) -> BatchSizes:
        """For the memory that there is now. Raises MissingExtra where it cannot be told."""
        # Weights that are read as a file is, the system may drop and read again: nothing is gained by their room.
        kept = mapped_bytes() if model.device.type == "cpu" else 0
        return cls(SHARE * available_memory(model.device, kept=kept), new_tokens)

    def next(self, lengths: Sequence[int], at: int) -> int:
        """How many rows are decoded together, from row ``at`` on.

        Args:
            lengths: tokens of each row's prompt, longest first.
        """
        longest = lengths[at]
        like = bisect_left(lengths, -longest / 2, lo=at, key=lambda length: -length) - at  # at most half is padding
        fit = self.most
        if self.per_position is not None:
            fit = max(min(fit, int(self.budget / max(self.per_position * (longest + self.new_tokens), 1))), 1)
        return math.ceil(like / math.ceil(like / fit))  # batches of like size, not one of what is left

    def measured(self, peak: int, width: int, cost: Cost) -> None:
        """Note what the first batch took at most: ``peak`` bytes, its prompts padded to ``width`` tokens."""
        self.per_position = peak / cost.rows / (width + cost.steps + 1)
        self.most = MOST_ROWS

    def halve(self, rows: int) -> None:
        """Note that a batch of so many rows did not fit."""
        self.most = max(rows // 2, 1)


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device's or the system's memory did not suffice."""
    words = "DefaultCPUAllocator", "MPS backend out of memory"
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(word in str(error) for word in words)
