"""What a model learns in order to skip layers well: maps in place of skipped layers, bottlenecks before some others.

It changes only positions that skip layers, so that full depth, and a prompt that runs all layers, stay the model's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from ..errors import ScheduleError
from ..schedule import Schedule

#: A bottleneck stands before every fourth layer: few wide ones cost a step less than many narrow ones.
EVERY = 4


class Gap(NamedTuple):
    """A stretch of layers that a position skips, between two that it runs: ``start`` to ``stop - 1``."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.start}-{self.stop}"


def gaps_between(layers: Sequence[int], num_layers: int) -> list[Gap]:
    """Return the gaps between the layers that a position runs, in network order."""
    return [Gap(a + 1, b) for a, b in pairwise((-1, *layers, num_layers)) if b > a + 1]


class LowRank(nn.Module):
    """Two matrices, (size, rank) and (rank, size); the second begins at 0, so that nothing changes at first."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(size, rank) / size**0.5)
        self.up = nn.Parameter(torch.zeros(rank, size))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states (…, size) changed, in their dtype."""
        if self.down.device != hidden.device:  # layers may be on several devices
            self.to(hidden.device)
        # In two dimensions: of three, products take several times longer for one position of a few rows on a CPU.
        rows = hidden.reshape(-1, hidden.shape[-1]).to(self.down.dtype)
        return self.changed(rows).view(hidden.shape).to(hidden.dtype)

    def changed(self, hidden: Tensor) -> Tensor:
        """Return hidden states (positions, size) with the change added."""
        raise NotImplementedError


class StandIn(LowRank):
    """An affine map in the place of a gap: ``h + (h A) B + c``."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__(size, rank)
        self.bias = nn.Parameter(torch.zeros(size))

    def changed(self, hidden: Tensor) -> Tensor:
        """Return an estimate of the hidden states after the skipped layers."""
        return torch.addmm(hidden + self.bias, hidden @ self.down, self.up)


class Bottleneck(LowRank):
    """A correction before a layer that runs: ``h + silu(norm(h) A) B``, with the root mean square as the norm."""

    def changed(self, hidden: Tensor) -> Tensor:
        """Return corrected hidden states. The norm is a factor, so it can follow the product: a smaller operation."""
        factor = hidden.shape[-1] ** 0.5 / torch.linalg.vector_norm(hidden, dim=-1, keepdim=True).clamp_min(1e-6)
        return torch.addmm(hidden, silu((hidden @ self.down) * factor), self.up)


class Adapter(nn.Module):
    """The stand-ins and bottlenecks of one model, for one speed-up or several.

    Args:
        size: width of the hidden states.
        rank: of each map and bottleneck, at most ``size``.
        schedules: by target speed-up.
    """

    def __init__(self, size: int, rank: int, schedules: Mapping[float, Schedule]) -> None:
        super().__init__()
        self.size = size
        self.rank = min(rank, size)
        self.schedules = dict(schedules)
        runs = set().union(*(prompt_runs(each) | step_runs(each) for each in schedules.values()))
        total = next(iter(schedules.values())).num_layers
        gaps = {gap for layers in runs for gap in gaps_between(layers, total)}
        running = {layer for layers in runs if len(layers) < total for layer in layers if (layer + 1) % EVERY == 0}
        self.stand_ins = nn.ModuleDict({str(gap): StandIn(size, self.rank) for gap in sorted(gaps)})
        self.bottlenecks = nn.ModuleDict({str(layer): Bottleneck(size, self.rank) for layer in sorted(running)})

    def apply_before(self, layer: int, hidden: Tensor, axis: int, counts: Sequence[int]) -> Tensor:
        """Return what a layer is given: changed at the positions that skip layers, and run this one or enter a gap.

        Args:
            layer: index of the layer.
            hidden: what the layer would be given.
            axis: of the positions in ``hidden``.
            counts: how many positions of the pass each layer runs, from the first on.
        """
        parts, start = [], 0
        for end, module in self._stretches(layer, counts, hidden.shape[axis]):
            if end > start:
                part = hidden.narrow(axis, start, end - start)
                parts.append(part if module is None else module(part))
                start = end
        return torch.cat(parts, axis) if len(parts) > 1 else parts[0]

    def _stretches(self, layer: int, counts: Sequence[int], width: int) -> Iterator[tuple[int, nn.Module | None]]:
        """Yield, for each stretch of positions, where it ends and what changes it."""
        if str(layer) in self.bottlenecks:
            yield min(counts), None
            yield counts[layer], self.bottlenecks[str(layer)]
        else:
            yield counts[layer], None
        done, entered = counts[layer], counts[layer - 1] if layer else width
        for stop in range(layer + 1, len(counts) + 1):
            if done >= entered:
                break
            # Positions from ``done`` to ``end`` run layer ``stop``, and none between it and ``layer``.
            end = min(counts[stop], entered) if stop < len(counts) else entered
            if end > done:
                yield end, self.stand_ins[str(Gap(layer, stop))]
                done = end
        yield width, None

    def changes(self, layers: Sequence[int]) -> dict[int, LowRank]:
        """Return what acts before which layer, at a position that runs ``layers``, which are in network order."""
        total = next(iter(self.schedules.values())).num_layers
        if len(layers) == total:
            return {}
        found: dict[int, Any] = {gap.start: self.stand_ins[str(gap)] for gap in gaps_between(layers, total)}
        return found | {layer: self.bottlenecks[str(layer)] for layer in layers if str(layer) in self.bottlenecks}

    def flops(self, layers: Sequence[int]) -> int:
        """Return the FLOPs at one position that runs ``layers``, which are in network order."""
        here = self.changes(layers).values()
        return sum(2 * weight.numel() for each in here for weight in each.parameters() if weight.ndim == 2)


def check_trained(trained: Mapping[float, Schedule], schedule: Schedule) -> None:
    """Raise ScheduleError if a schedule skips layers together that none of an adapter's does.

    Args:
        trained: the adapter's schedules by target speed-up.
        schedule: the one to check.
    """
    for runs, where in ((prompt_runs, " in a prompt"), (step_runs, "")):
        known = set().union(*map(runs, trained.values()))
        for layers in sorted(runs(schedule) - known):
            if gaps := gaps_between(layers, schedule.num_layers):
                skipped = ", ".join(f"{gap.start} to {gap.stop - 1}" for gap in gaps)
                speedups = ", ".join(f"{speedup:g}" for speedup in trained)
                raise ScheduleError(
                    f"the adapter was not trained to skip layers {skipped}{where}, as the schedule does: take one of "
                    f"its speed-ups ({speedups}), as they are"
                )


def prompt_runs(schedule: Schedule) -> set[tuple[int, ...]]:
    """Return the layers that the positions of a prompt run."""
    return {schedule.layers(schedule.prompt_depth(distance)) for distance in range(1, schedule.prompt_decay + 2)}


def step_runs(schedule: Schedule) -> set[tuple[int, ...]]:
    """Return the layers that the positions of decode steps run."""
    return {schedule.layers(depth) for depth in schedule.distinct_depths}
