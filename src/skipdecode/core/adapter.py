"""What a model learns in order to skip layers well: small maps that stand in for skipped stretches of layers.

It changes only positions that skip layers, so that full depth, and a prompt that runs all layers, stay the model's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ScheduleError
from .schedule import Schedule


class Gap(NamedTuple):
    """A stretch of layers that a position skips, between two that it runs: ``start`` to ``stop - 1``."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.start}-{self.stop}"


def gaps_between(layers: Sequence[int], num_layers: int) -> list[Gap]:
    """Return the gaps between the layers that a position runs, in network order."""
    return [Gap(a + 1, b) for a, b in pairwise((-1, *layers, num_layers)) if b > a + 1]


class StandIn(nn.Module):
    """A low-rank affine map in the place of a gap: ``h + (h A) B + c`` for hidden states ``h`` (…, size).

    It starts as the identity.
    """

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(size, rank) / size**0.5)
        self.up = nn.Parameter(torch.zeros(rank, size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the estimated hidden states after the gap, in the dtype of ``hidden``."""
        if self.down.device != hidden.device:  # layers may be on several devices
            self.to(hidden.device)
        wide = hidden.to(self.down.dtype)
        return (wide + (wide @ self.down) @ self.up + self.bias).to(hidden.dtype)


class Adapter(nn.Module):
    """The stand-ins of one model, by gap, for one speed-up or several.

    Args:
        size: width of the hidden states.
        rank: of each stand-in, at most ``size``.
        schedules: by target speed-up.
    """

    def __init__(self, size: int, rank: int, schedules: Mapping[float, Schedule]) -> None:
        super().__init__()
        self.rank, self.schedules = min(rank, size), dict(schedules)
        gaps = set().union(*map(gaps_of, schedules.values()))
        self.stand_ins = nn.ModuleDict({str(gap): StandIn(size, self.rank) for gap in sorted(gaps)})

    def fill(self, hidden: Tensor, axis: int, counts: Sequence[int], layer: int) -> Tensor:
        """Apply stand-ins to the positions whose gap begins at ``layer``.

        Args:
            hidden: what the layer is given.
            axis: of the positions in ``hidden``.
            counts: how many positions of the pass each layer runs, from the first on.
            layer: index of the layer.
        """
        width = hidden.shape[axis]
        last = counts[layer - 1] if layer else width
        if counts[layer] >= last:
            return hidden
        parts, done = [hidden.narrow(axis, 0, counts[layer])] if counts[layer] else [], counts[layer]
        for stop in range(layer + 1, len(counts) + 1):
            # Positions from ``done`` to ``end`` run layer ``stop``, and none between it and ``layer``.
            end = min(counts[stop], last) if stop < len(counts) else last
            if end > done:
                stand_in = self.stand_ins[str(Gap(layer, stop))]
                parts.append(stand_in(hidden.narrow(axis, done, end - done)))
                done = end
        if last < width:
            parts.append(hidden.narrow(axis, last, width - last))
        return torch.cat(parts, axis) if len(parts) > 1 else parts[0]

    def flops(self, layers: Sequence[int]) -> int:
        """Return the FLOPs of the stand-ins of one position that runs ``layers``, which are in network order."""
        gaps = gaps_between(layers, next(iter(self.schedules.values())).num_layers)
        weights = (weight for gap in gaps for weight in self.stand_ins[str(gap)].parameters() if weight.ndim == 2)
        return sum(2 * weight.numel() for weight in weights)

    def check(self, schedule: Schedule) -> None:
        """Raise ScheduleError if the schedule skips a stretch of layers that has no stand-in."""
        for gap in gaps_of(schedule):
            if str(gap) not in self.stand_ins:
                known = ", ".join(f"{speedup:g}" for speedup in self.schedules)
                raise ScheduleError(
                    f"the adapter has no stand-in for layers {gap.start} to {gap.stop - 1}, which the schedule skips: "
                    f"take one of its speed-ups ({known})"
                )


def gaps_of(schedule: Schedule) -> set[Gap]:
    """Return the gaps of all positions of a schedule, in the prompt too."""
    in_prompt = {schedule.prompt_depth(distance) for distance in range(1, schedule.prompt_decay + 2)}
    depths = in_prompt | {*schedule.distinct_depths}
    return {gap for depth in depths for gap in gaps_between(schedule.layers(depth), schedule.num_layers)}
