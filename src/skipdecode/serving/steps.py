"""Plans which tokens of a step run which layers, from each request's schedule and positions alone.

Imports no vLLM and uses no device: requests, counts and positions are numpy arrays on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..model.adapter import Adapter, LowRank
from ..schedule import Schedule

Flags = NDArray[np.bool_]
Whole = NDArray[np.int64]


class Table:
    """The layers that a schedule runs at each position: rows for the prompt, then for steps; the last row repeats."""

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
        #: The layers of each row, in network order.
        self.layers = [schedule.layers(depth) for depth in depths]
        #: Add this to a position, counted from the prompt's end, to get its row.
        self.shift = inside + 1
        #: The first so many rows run all layers, since depths never increase.
        self.full = sum(depth == schedule.num_layers for depth in depths)
        #: Index of this table's first row in the joined table of :class:`Tables`.
        self.first = 0

    def rows(self, steps: Whole) -> Whole:
        """Return the row of each position, given as position minus prompt length (negative inside the prompt)."""
        return np.clip(steps + self.shift, 0, len(self.runs) - 1)


class Tables:
    """The tables of all schedules of a server, joined into one.

    Args:
        schedules: by speed-up. A table for full depth is added under None, for requests without a schedule.
        adapter: what it changes is looked up for each row.
    """

    def __init__(self, schedules: Mapping[float, Schedule], adapter: Adapter | None = None) -> None:
        full = Schedule.full(next(iter(schedules.values())).num_layers)
        tables: dict[float | None, Table] = {None: Table(full)}
        tables |= {speedup: Table(schedule) for speedup, schedule in schedules.items()}
        first = 0
        for table in tables.values():
            table.first, first = first, first + len(table.runs)
        self._tables = tables
        self._runs: Flags = np.concatenate([table.runs for table in tables.values()])
        known = {row.tobytes(): kind for kind, row in enumerate(kinds(tables.values()))}
        #: (rows,), which of :func:`kinds` the row is; -1: none.
        self._kinds: Whole = np.array([known.get(row.tobytes(), -1) for row in self._runs])
        #: How many kinds there are.
        self.kinds = len(known)
        self._modules: list[LowRank] = []
        #: (rows, layers): 1 + the place in ``_modules`` of what acts before the layer; 0: nothing acts.
        self._changes: Whole | None = None
        if adapter is not None:
            rows = [layers for table in tables.values() for layers in table.layers]
            self._changes = np.zeros(self._runs.shape, dtype=np.int64)
            for row, layers in enumerate(rows):
                for layer, module in adapter.changes(layers).items():
                    if module not in self._modules:
                        self._modules.append(module)
                    self._changes[row, layer] = 1 + self._modules.index(module)

    def of(self, speedup: float | None) -> Table:
        """Return the table of a speed-up (None: full depth), the same object each time."""
        return self._tables[speedup]

    def step(self, tables: Sequence[Table], counts: Whole, computed: Whole, prompts: Whole) -> Step:
        """Return the plan of one step.

        Args:
            tables: each request's table, from :meth:`of`.
            counts: (requests,), how many tokens each request has in the step; they are contiguous.
            computed: (requests,), how many tokens of each request earlier steps have computed.
            prompts: (requests,), each request's prompt length. All three may be of any integer type.
        """
        counts, computed, prompts = (each.astype(np.int64) for each in (counts, computed, prompts))
        facts = [(table.shift, len(table.runs) - 1, table.first, table.full) for table in tables]
        shift, last, first, full = np.array(facts, dtype=np.int64).T
        starts = np.zeros(len(tables) + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        rows = computed - prompts + shift  # of each request's first token
        # If a request's last token runs all layers, its earlier ones do too.
        if (np.minimum(np.maximum(rows + counts - 1, 0), last) < full).all():
            return Step(np.broadcast_to(np.True_, (int(starts[-1]), tables[0].runs.shape[1])), starts, kind=0)
        rows = np.arange(starts[-1]) + np.repeat(rows - starts[:-1], counts)
        return self._step(np.minimum(np.maximum(rows, 0), np.repeat(last, counts)) + np.repeat(first, counts), starts)

    def alike(self, kind: int, tokens: int) -> Step:
        """Return the plan of a step in which each of so many requests has one token, all of this kind."""
        return self._step(np.full(tokens, np.flatnonzero(self._kinds == kind)[0]), np.arange(tokens + 1))

    def _step(self, rows: Whole, starts: Whole) -> Step:
        kind = int(self._kinds[rows[0]])
        alike = kind >= 0 and bool((self._kinds[rows] == kind).all())
        changes = None
        if self._changes is not None:
            changes = Changes(self._changes[rows[:1] if alike else rows], self._modules)
        return Step(self._runs[rows], starts, kind if alike else None, changes)


def kinds(tables: Iterable[Table]) -> list[Flags]:
    """Return which layers a step may run if all its tokens run the same: all of them, then those of each decode step.

    A CUDA graph can be kept for each, whatever the speed-up of its rows.
    """
    made: dict[bytes, Flags] = {}
    for table in tables:
        steps = table.runs[min(table.shift, len(table.runs) - 1) :]
        for row in steps if made else table.runs[:1]:  # the first table is full depth's
            made.setdefault(row.tobytes(), row)
    return list(made.values())


@dataclass(frozen=True)
class Part:
    """The tokens of a step that a layer runs, if it runs some but not all."""

    #: (tokens,), the tokens' indices in the step.
    tokens: Whole
    #: (requests,), indices of the requests that have such tokens.
    requests: Whole
    #: (requests,), how many of each such request's tokens run: its first ones in the step, since depths never increase.
    counts: Whole
    #: (requests,), how many of each such request's tokens in the step do not run.
    dropped: Whole


class Changes:
    """What an adapter changes in one step.

    Args:
        places: (tokens, layers), 1 + the index of the module that acts on a token before a layer; 0: none. One row: it
            is every token's.
        modules: the adapter's.
    """

    def __init__(self, places: Whole, modules: Sequence[LowRank]) -> None:
        self._places, self._modules = places, modules

    def before(self, layer: int) -> list[tuple[LowRank, Whole | None]]:
        """Return the modules that act before a layer, each with the indices of its tokens; None: it acts on all."""
        column = self._places[:, layer]
        if len(column) == 1 or (column == column[0]).all():
            return [(self._modules[column[0] - 1], None)] if column[0] else []
        return [(self._modules[place - 1], np.flatnonzero(column == place)) for place in np.unique(column) if place]


class Step:
    """The plan of one step.

    Args:
        runs: (tokens, layers), True where the token runs the layer.
        starts: (requests + 1,), index of each request's first token, then the total.
        kind: the place in :func:`kinds` of the layers that all its tokens run, 0 being all layers; None: there is none.
        changes: those of the server's adapter, if there is one.
    """

    def __init__(self, runs: Flags, starts: Whole, kind: int | None = None, changes: Changes | None = None) -> None:
        self.runs = runs
        self.starts = starts
        self.kind = kind
        self.changes = changes
        self.tokens, layers = runs.shape
        #: How many tokens run each layer.
        self.counts: list[int] = [self.tokens] * layers if kind == 0 else runs.sum(axis=0).tolist()
        self.is_full = self.counts == [self.tokens] * layers
        self._parts: dict[bytes, Part] = {}

    def part(self, layer: int) -> Part:
        """Return which tokens run a layer; layers that run the same tokens share one object."""
        column = self.runs[:, layer]
        key = column.tobytes()
        if key not in self._parts:
            counts = np.add.reduceat(column.astype(np.int64), self.starts[:-1])
            requests = np.flatnonzero(counts)
            dropped = np.diff(self.starts)[requests] - counts[requests]
            self._parts[key] = Part(np.flatnonzero(column), requests, counts[requests], dropped)
        return self._parts[key]
