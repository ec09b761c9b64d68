"""Plans of steps: which tokens run which layers, from each request's schedule and positions alone.

Imports no vLLM and uses no device: requests, counts and positions are numpy arrays on the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..model.adapter import Adapter, LowRank
from ..schedule import Schedule

Flags = NDArray[np.bool_]
Whole = NDArray[np.int64]


class DepthTable:
    """Layers that a schedule runs at each position: rows for the prompt, then for the steps. The last row repeats.

    Attributes:
        runs: (rows, layers), True where the row runs the layer.
        shift: the row of a position is ``position - prompt length + shift``, clipped to the rows.
        first: place of its first row in the joined table of :class:`DepthTables`.
    """

    def __init__(self, schedule: Schedule, first: int = 0) -> None:
        decay = schedule.prompt_decay
        depths = [schedule.deepest, *(schedule.prompt_depth(distance) for distance in range(decay, 0, -1))]
        depths += [schedule.depth(step) for step in range(schedule.horizon)]
        while depths[-2:] == 2 * depths[-1:]:
            depths.pop()
        ranks = np.empty(schedule.num_layers, dtype=np.int64)
        ranks[list(schedule.ranking)] = np.arange(schedule.num_layers)
        self.runs: Flags = ranks < np.array(depths)[:, None]
        self.shift = decay + 1
        self.first = first

    def rows(self, steps: Whole) -> Whole:
        """Rows of positions, which count from the prompt's end: negative ones are in the prompt."""
        return np.clip(steps + self.shift, 0, len(self.runs) - 1)

    def end(self, layers: Sequence[int]) -> float:
        """First position, counted from the prompt's end, from which none of these layers runs.

        Minus infinity: no position runs one of them. Infinity: they never end.
        """
        running = int(self.runs[:, list(layers)].any(axis=1).sum())  # the first rows, as depths never increase
        if running == len(self.runs):
            return math.inf
        return running - self.shift if running else -math.inf


class DepthTables:
    """Depth tables of all schedules of a server, joined into one.

    Args:
        schedules: by speed-up. The full model is added as None, for requests without a schedule.
        adapter: the modules of each row are looked up too.

    Attributes:
        uniform: (layer sets, layers), the distinct layers that all tokens of a decode step can run, the full model's
            first. A CUDA graph can be kept for each, whatever the speed-up of its requests.
    """

    def __init__(self, schedules: Mapping[float, Schedule], adapter: Adapter | None = None) -> None:
        full = Schedule.full(next(iter(schedules.values())).num_layers)
        self._tables: dict[float | None, DepthTable] = {}
        first = 0
        sets: dict[bytes, Flags] = {}
        for speedup, schedule in [(None, full), *schedules.items()]:
            self._tables[speedup] = table = DepthTable(schedule, first)
            first += len(table.runs)
            sets |= {row.tobytes(): row for row in table.runs[min(table.shift, len(table.runs) - 1) :]}
        self._runs: Flags = np.concatenate([table.runs for table in self._tables.values()])
        self.uniform: Flags = np.stack(list(sets.values()))
        places = {key: place for place, key in enumerate(sets)}
        self._places: Whole = np.array([places.get(row.tobytes(), -1) for row in self._runs])
        self._acts: Whole = np.zeros(self._runs.shape, dtype=np.int64)
        self._modules: list[LowRank] = []
        if adapter is not None:
            self._modules = [module for module in adapter.modules() if isinstance(module, LowRank)]
            for row, runs in enumerate(self._runs):
                for layer, module in adapter.changes(np.flatnonzero(runs).tolist()).items():
                    self._acts[row, layer] = 1 + self._modules.index(module)

    def of(self, speedup: float | None) -> DepthTable:
        """Table that was made for a speed-up; None stands for the full model."""
        return self._tables[speedup]

    def step(self, tables: Sequence[DepthTable], counts: Whole, computed: Whole, prompts: Whole) -> StepPlan:
        """Plan of one step.

        Args:
            tables: the requests' tables, from :meth:`of`.
            counts: (requests,), tokens of each request in the step; they are contiguous.
            computed: (requests,), tokens of each request that earlier steps have computed.
            prompts: (requests,), prompt lengths.
        """
        facts = [(table.shift, len(table.runs) - 1, table.first) for table in tables]
        shift, last, first = np.array(facts, dtype=np.int64).T
        starts = np.concatenate([[0], np.cumsum(counts)])
        # Row of each request's first token, less its place in the step: adding places gives every token's row.
        offsets = computed.astype(np.int64) - prompts + shift - starts[:-1]
        rows = np.arange(starts[-1]) + np.repeat(offsets, counts)
        rows = np.minimum(np.maximum(rows, 0), np.repeat(last, counts)) + np.repeat(first, counts)
        return self._plan(rows, starts)

    def uniform_step(self, place: int, tokens: int) -> StepPlan:
        """Plan of a step whose requests have one token each and run the layers ``uniform[place]``."""
        return self._plan(np.full(tokens, np.flatnonzero(self._places == place)[0]), np.arange(tokens + 1))

    def _plan(self, rows: Whole, starts: Whole) -> StepPlan:
        places = self._places[rows]
        uniform = int(places[0]) if places[0] >= 0 and (places == places[0]).all() else None
        acts = self._acts[rows if uniform is None else rows[:1]]
        return StepPlan(self._runs[rows], starts, uniform, acts, self._modules)


@dataclass(frozen=True, eq=False)
class TokenSubset:
    """Tokens of a step that run a layer together, if they are not all.

    Attributes:
        tokens: (tokens,), their indices in the step.
        requests: (requests,), indices of the requests that have such tokens.
        counts: (requests,), how many of each one's tokens there are; they are contiguous.
        dropped: (requests,), how many come after them.
    """

    tokens: Whole
    requests: Whole
    counts: Whole
    dropped: Whole


@dataclass
class StepPlan:
    """Plan of one step.

    Attributes:
        runs: (tokens, layers), True where the token runs the layer.
        starts: (requests + 1,), index of each request's first token, then the total.
        uniform: place in :attr:`DepthTables.uniform` of the layers that all tokens run; None: the step is not uniform.
        acts: (tokens or 1, layers), 1 + the index of the module that acts on the token before the layer; 0: none.
        modules: the adapter's.
        counts: how many tokens run each layer.
    """

    runs: Flags
    starts: Whole
    uniform: int | None
    acts: Whole
    modules: Sequence[LowRank]
    _subsets: dict[bytes, TokenSubset] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = len(self.runs)
        self.counts: list[int] = self.runs.sum(axis=0).tolist()
        self.is_full = self.uniform == 0
        self._skips: Flags = np.logical_not(self.runs.all(axis=1))

    def parts(self, layer: int, has_private: bool = False) -> list[tuple[bool, TokenSubset | None]]:
        """Tokens that run a layer, as (whether they run its private copy, subset); None: all tokens of the step.

        Tokens that skip other layers run the private copy, if there is one. They come after those that do not, whose
        keys they may attend to.
        """
        if not self.counts[layer]:
            return []
        if self.uniform is not None:
            return [(has_private and not self.is_full, None)]
        runs = self.runs[:, layer]
        private = runs & self._skips if has_private else np.zeros_like(runs)
        sides = ((False, runs & ~private), (True, private))
        return [(side, None if mask.all() else self._subset(mask)) for side, mask in sides if mask.any()]

    def _subset(self, mask: Flags) -> TokenSubset:
        """Subset of the tokens in a mask, (tokens,). Equal masks share one object."""
        key = mask.tobytes()
        if key not in self._subsets:
            counts = np.add.reduceat(mask.astype(np.int64), self.starts[:-1])
            requests = np.flatnonzero(counts)
            tokens = np.flatnonzero(mask)
            last = tokens[np.cumsum(counts[requests]) - 1]
            self._subsets[key] = TokenSubset(tokens, requests, counts[requests], self.starts[1:][requests] - 1 - last)
        return self._subsets[key]

    def adapter_modules(self, layer: int) -> list[tuple[LowRank, Whole | None]]:
        """Modules that act before a layer, each with the indices of its tokens; None: all tokens."""
        if not self.modules:
            return []
        acts = self.acts[:, layer]
        places = np.unique(acts)
        is_one = len(places) == 1
        return [
            (self.modules[place - 1], None if is_one else np.flatnonzero(acts == place)) for place in places if place
        ]
