"""Sample each text with random numbers of its own, so that it does not depend on the other prompts of its batch."""

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
    """Draws each text's tokens with random numbers that depend only on the seed and the prompt's number in the job.

    It is a "watermark" that marks nothing: only watermarks process scores after temperature, top-k and the like.

    Attributes:
        rows: the number in the job of each prompt of the batch.
    """

    seed: int
    rows: Sequence[int]

    def validate(self) -> None:
        """Do nothing: every value is valid."""

    def construct_processor(self, vocab_size: int, device: Any) -> LogitsProcessor:
        """Return the processor that draws each token from its scores; ``model.generate`` calls it last."""
        return _Draw([torch.Generator(device).manual_seed(stable_hash(self.seed, row)) for row in self.rows])


class _Draw(LogitsProcessor):
    """Draws one token per sequence from the softmax of its scores (batch, vocabulary), and sets all others to -inf."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = generators

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # The token at which the sum of probabilities passes a random share of the whole: one number per text. Doubles,
        # so that rounding shifts no token's share; float32 where there are none.
        wide = torch.float32 if scores.device.type == "mps" else torch.float64
        sums = scores.softmax(-1).cumsum(-1, dtype=wide)
        shares = [torch.rand(1, generator=g, device=scores.device, dtype=wide) for g in self.generators]
        total = sums[:, -1:]
        # Below the whole, also if rounded: so the token's own probability is above 0.
        passed = torch.minimum(torch.stack(shares) * total, torch.nextafter(total, torch.zeros_like(total)))
        chosen = torch.searchsorted(sums, passed, right=True).clamp(max=scores.shape[-1] - 1)
        # Not just 0: NaN stays NaN, and raises the same error as without this processor.
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0 * total.to(scores.dtype))


def stable_hash(*parts: int) -> int:
    """Return a hash from 0 to 2**63 - 1 that is the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
