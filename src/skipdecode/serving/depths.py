"""Plans which tokens of a step run which layers, from each request's schedule and its positions alone.

No vLLM here, and no device: requests, counts and positions are numpy arrays on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        while depths[-2:] == 2 * depths[-1:]:
            depths.pop()
        ranks = np.empty(schedule.num_layers, dtype=np.int64)
        ranks[list(schedule.ranking)] = np.arange(schedule.num_layers)
        #: (rows, layers): whether the layer runs.
        self.runs: Flags = ranks < np.array(depths)[:, None]
        #: What is added to a position, counted from the prompt's end, to have its row.
        self.shift = inside + 1
        #: How many rows run all layers: the first ones, since depths never increase.
        self.full = sum(depth == schedule.num_layers for depth in depths)
        #: Where its rows begin among those of :class:`Tables`.
        self.first = 0

    def rows(self, steps: Whole) -> Whole:
        """The row of each position, given as position less prompt length (negative inside the prompt)."""
        return np.clip(steps + self.shift, 0, len(self.runs) - 1)


class Tables:
    """The tables of all schedules of a server, one below the other.

    Args:
        schedules: by speed-up. None stands for full depth, of requests that have no schedule.
    """

    def __init__(self, schedules: Mapping[float, Schedule]) -> None:
        full = Schedule.full(next(iter(schedules.values())).num_layers)
        tables: dict[float | None, Table] = {None: Table(full)}
        tables |= {speedup: Table(schedule) for speedup, schedule in schedules.items()}
        first = 0
        for table in tables.values():
            table.first, first = first, first + len(table.runs)
        self._tables = tables
        self._runs: Flags = np.concatenate([table.runs for table in tables.values()])
        self._batch: list[Table] = []
        self._facts: Whole = np.zeros((4, 0), dtype=np.int64)

    def of(self, speedup: float | None) -> Table:
        """The table of a speed-up; one object for each."""
        return self._tables[speedup]

    def step(self, tables: Sequence[Table], counts: Whole, computed: Whole, prompts: Whole) -> Step:
        """What one step runs.

        Args:
            tables: of each request of the step, as :meth:`of` gave them.
            counts: (requests,), tokens that each request has in the step, one after another.
            computed: (requests,), tokens of each request before these.
            prompts: (requests,), the length of each request's prompt.
        """
        if self._batch != tables:  # mostly the requests of the step before
            facts = [(table.shift, len(table.runs) - 1, table.first, table.full) for table in tables]
            self._batch, self._facts = list(tables), np.array(facts).T
        shift, last, first, full = self._facts
        starts = np.zeros(len(tables) + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        rows = computed - prompts + shift  # of each request's first token
        # Where its last token runs all layers, all of its tokens do.
        if (np.minimum(np.maximum(rows + counts - 1, 0), last) < full).all():
            return Step(np.broadcast_to(np.True_, (int(starts[-1]), tables[0].runs.shape[1])), starts, is_full=True)
        rows = np.arange(starts[-1]) + np.repeat(rows - starts[:-1], counts)
        rows = np.minimum(np.maximum(rows, 0), np.repeat(last, counts)) + np.repeat(first, counts)
        return Step(self._runs[rows], starts)


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
        is_full: every token is known to run every layer.
    """

    def __init__(self, runs: Flags, starts: Whole, is_full: bool = False) -> None:
        self.runs = runs
        self.starts = starts
        self.tokens, layers = runs.shape
        #: By layer: how many tokens run it.
        self.counts: list[int] = [self.tokens] * layers if is_full else runs.sum(axis=0).tolist()
        #: Whether every token runs every layer.
        self.is_full = is_full or self.counts == [self.tokens] * layers
        self._parts: dict[bytes, Part] = {}

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
