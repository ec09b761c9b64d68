"""Random numbers that are a row's own: what it samples depends on the seed and its number, not on its batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.configuration_utils import BaseWatermarkingConfig


@dataclass
class Sampling(BaseWatermarkingConfig):
    """Draws each row's tokens with numbers that depend on the seed and the row alone, not on its batch.

    ``model.generate`` lets nobody else process the scores after temperature, top-k and the like; hence a "watermark"
    that marks nothing.

    Attributes:
        seed: of the job.
        rows: the number of each row of the batch in the job.
    """

    seed: int
    rows: Sequence[int]

    def validate(self) -> None:
        """Nothing can be wrong."""

    def construct_processor(self, vocab_size: int, device: Any) -> LogitsProcessor:
        """What ``model.generate`` calls last."""
        return _Draw([torch.Generator(device).manual_seed(stable_hash(self.seed, row)) for row in self.rows])


class _Draw(LogitsProcessor):
    """Leaves of each row's scores (rows, vocabulary) one token, drawn from their softmax."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = generators

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        probabilities = scores.softmax(-1)
        # The largest of p / (exponential noise) is token i with probability p_i: what torch.multinomial does.
        noise = [
            torch.empty_like(row).exponential_(generator=g) for row, g in zip(scores, self.generators, strict=True)
        ]
        chosen = (probabilities / torch.stack(noise)).argmax(-1, keepdim=True)
        # Not just 0: NaN stays NaN, and ends the job as it would without us.
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0 * probabilities.gather(1, chosen))


def stable_hash(*parts: int) -> int:
    """63 bits, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
