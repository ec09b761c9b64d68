"""Which tokens of a step run which layers: a function of each request's schedule and of positions, never of phases.

No vLLM here, and no device: requests, counts and positions are numpy arrays on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..core.schedule import Schedule

Flags = NDArray[np.bool_]
Whole = NDArray[np.int64]


class Table:
    """One schedule as rows of layers: prompt positions first, then the steps; the last row holds from there on."""

    def __init__(self, schedule: Schedule) -> None:
        inside = schedule.prompt_decay
        depths = [schedule.deepest, *(schedule.prompt_depth(distance) for distance in range(inside, 0, -1))]
        depths += [schedule.depth(step) for step in range(schedule.horizon)]
        ranks = np.empty(schedule.num_layers, dtype=np.int64)
        ranks[list(schedule.ranking)] = np.arange(schedule.num_layers)
        #: (rows, layers): whether the layer runs.
        self.runs: Flags = ranks < np.array(depths)[:, None]
        self.shift = inside + 1

    def rows(self, steps: Whole) -> Whole:
        """The row of each position, given as position less prompt length (negative inside the prompt)."""
        return np.clip(steps + self.shift, 0, len(self.runs) - 1)


class Tables:
    """The tables of the speed-ups that requests have had so far, in one array."""

    def __init__(self, schedule: Callable[[float], Schedule]) -> None:
        self._schedule = schedule
        self._known: dict[float, tuple[Table, int]] = {}  # with the first row in the array
        self.runs: Flags | None = None

    def of(self, speedup: float) -> tuple[Table, int]:
        """The table of a speed-up, and where it begins."""
        if speedup not in self._known:
            table = Table(self._schedule(speedup))
            before = 0 if self.runs is None else len(self.runs)
            self.runs = table.runs if self.runs is None else np.concatenate([self.runs, table.runs])
            self._known[speedup] = table, before
        return self._known[speedup]

    def step(self, speedups: Sequence[float], counts: Whole, computed: Whole, prompts: Whole) -> Step:
        """What one step runs.

        Args:
            speedups: of each request of the step.
            counts: (requests,), tokens that each request has in the step, one after another.
            computed: (requests,), tokens of each request before these.
            prompts: (requests,), the length of each request's prompt.
        """
        starts = np.concatenate([[0], np.cumsum(counts)])
        steps = np.arange(starts[-1]) + np.repeat(computed - prompts - starts[:-1], counts)
        found = [self.of(speedup) for speedup in speedups]
        shift = np.repeat([table.shift for table, _ in found], counts)
        last = np.repeat([len(table.runs) - 1 for table, _ in found], counts)
        first = np.repeat([first for _, first in found], counts)
        assert self.runs is not None
        return Step(self.runs[first + np.clip(steps + shift, 0, last)], starts)


@dataclass(frozen=True)
class Part:
    """The tokens of a step that a layer runs, where it runs some and not all."""

    #: (tokens,), their indices in the step.
    tokens: Whole
    #: (requests,), the requests that have any: indices in the step.
    requests: Whole
    #: (requests,), how many each of these has: the first of its tokens in the step, since depths never increase.
    counts: Whole
    #: (requests,), how many of its tokens in the step each of these leaves out.
    dropped: Whole


class Step:
    """The plan of one step.

    Args:
        runs: (tokens, layers), whether the token runs the layer.
        starts: (requests + 1,), where each request's tokens begin.
    """

    def __init__(self, runs: Flags, starts: Whole) -> None:
        self.runs = runs
        self.starts = starts
        needed = runs.sum(axis=0)
        self.tokens = len(runs)
        #: By layer: how many tokens run it.
        self.counts: list[int] = needed.tolist()
        self._parts: dict[bytes, Part] = {}

    @property
    def is_full(self) -> bool:
        """Whether every token runs every layer."""
        return all(count == self.tokens for count in self.counts)

    def part(self, layer: int) -> Part:
        """Which tokens run a layer that some run and some do not; one object for all layers of the same tokens."""
        column = self.runs[:, layer]
        key = column.tobytes()
        if key not in self._parts:
            counts = np.add.reduceat(column.astype(np.int64), self.starts[:-1])
            requests = np.flatnonzero(counts)
            dropped = np.diff(self.starts)[requests] - counts[requests]
            self._parts[key] = Part(np.flatnonzero(column), requests, counts[requests], dropped)
        return self._parts[key]
