"""The order in which training sees its rows: a function of the seed and the epoch alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices


def draw(*what: object) -> int:
    """32 bits that are a function of ``what`` alone, the same in every process."""
    return random.Random(" ".join(map(str, what))).getrandbits(32)


class LengthGrouped(Sampler[int]):
    """All rows once, those of like length side by side: transformers' grouping, from a generator of its own.

    transformers' own sampler draws from the global generator, whose state at the start of an epoch a resumed run does
    not have: it would train on other rows. The epoch is asked for, not told (``set_epoch``): with several processes
    accelerate does not pass it on through the batches that it skips. Every process makes the same order and takes its
    batches from it, so it must be resumed with as many processes.

    Args:
        lengths: of each row, in any unit.
        group: rows of one optimizer step, over all processes; they are the ones to be alike.
        seed: of the run.
        epoch: asked each time that an epoch begins.
    """

    def __init__(self, lengths: Sequence[int], group: int, seed: int, epoch: Callable[[], int]) -> None:
        self.lengths = list(lengths)
        self.group = group
        self.seed = seed
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        dice = torch.Generator().manual_seed(draw("order", self.seed, self.epoch()))
        return iter(get_length_grouped_indices(self.lengths, self.group, generator=dice))
