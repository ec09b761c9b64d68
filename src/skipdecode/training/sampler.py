"""The order of the training examples: a function of the seed and the epoch alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import torch
from transformers.trainer_pt_utils import LengthGroupedSampler


def draw(*what: object) -> int:
    """Return a random number of 32 bits that depends on ``what`` alone, so that all processes get the same."""
    return random.Random(" ".join(map(str, what))).getrandbits(32)


class LengthGrouped(LengthGroupedSampler):
    """Yields each example once, grouped by length, from a random generator of its own.

    transformers' draws from the global one, whose state a resumed run does not have, so that run would train on other
    examples. The epoch comes from a callback because accelerate does not forward ``set_epoch`` while it
    skips batches. All processes compute one order and share its batches: resume with the same number of processes.

    Args:
        lengths: the examples' lengths, in any unit.
        group: number of examples in an optimizer step over all processes, which get similar lengths.
        seed: the run's seed.
        epoch: returns the epoch; called at the start of each.
    """

    def __init__(self, lengths: Sequence[int], group: int, seed: int, epoch: Callable[[], int]) -> None:
        super().__init__(group, lengths=list(lengths))
        self.seed, self.epoch = seed, epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(draw("order", self.seed, self.epoch()))
        return super().__iter__()
