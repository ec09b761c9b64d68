"""Measured seconds of prompts and decode steps on one machine, and interpolation between them.

A decode step takes the same time outside the layers whatever runs, and about the same in each layer. So a few depths
and context lengths per batch size predict all others.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import FileError, UsageError
from ..files import read_json, write
from ..generation.generate import generate_ids
from ..model.inspect import text_config
from ..schedule import Schedule
from .timing import forced

#: Decode steps in each measurement.
STEPS = 8


@dataclass(frozen=True)
class Cell:
    """Measured seconds of a batch's prompt pass or decode step."""

    batch_size: int  #: Number of sequences.
    length: int  #: Positions of the prompt, or positions that the step attends to.
    depth: float  #: Layers that run; a mean over the positions of a prompt.
    seconds: float  #: The fastest of several rounds.


@dataclass
class Profile:
    """Measured prompt passes and decode steps of a model on a machine."""

    model: str
    machine: str  #: As :func:`skipdecode.loading.device.machine` describes it.
    settings: dict[str, Any] = field(default_factory=dict)  #: What else decides the speed: dtype, the adapter.
    prompts: list[Cell] = field(default_factory=list)
    steps: list[Cell] = field(default_factory=list)

    def missing(
        self, batch_sizes: Iterable[int], lengths: Sequence[int], schedules: Sequence[Schedule]
    ) -> list[tuple[int, int, Schedule]]:
        """Measurements that are wanted and not there, as (batch size, prompt length, schedule of constant depth)."""
        known = {(cell.batch_size, cell.length, cell.depth) for cell in self.steps}
        wanted = [(size, length, each) for size in batch_sizes for length in lengths for each in schedules]
        return [(size, n, each) for size, n, each in wanted if (size, n + STEPS // 2, each.max_depth) not in known]

    def measure(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        wanted: Sequence[tuple[int, int, Schedule]],
        rounds: int = 3,
        on_run: Callable[[], object] = lambda: None,
    ) -> None:
        """Measure what :meth:`missing` returned, on random tokens, and add it to the profile.

        UsageError: a prompt and :data:`STEPS` new tokens need more positions than the model has.
        """
        vocabulary = text_config(model.config).vocab_size
        generator = torch.Generator().manual_seed(0)
        found: list[list[tuple[float, float]]] = [[] for _ in wanted]
        for _ in range(rounds + 1):  # the outer loop: a passing load slows all cells alike
            for at, (size, length, schedule) in enumerate(wanted):
                ids = torch.randint(vocabulary // 8, vocabulary, (size, length), generator=generator).tolist()
                stats = generate_ids(model, tokenizer, ids, schedule, size, do_sample=False, **forced(STEPS)).stats
                found[at].append((stats.seconds - stats.decode_seconds, stats.decode_seconds / stats.steps))
                on_run()
        for (size, length, schedule), (_, *seconds) in zip(wanted, found, strict=True):
            prompt, step = map(min, zip(*seconds, strict=True))  # without the first round, which warms up
            self.prompts.append(Cell(size, length, prompt_depth(schedule, length), prompt))
            self.steps.append(Cell(size, length + STEPS // 2, schedule.max_depth, step))

    def save(self, path: Path) -> None:
        """Write the profile as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Profile that :meth:`save` wrote. Raises FileError if the file holds none."""
        values = read_json(path)
        try:
            cells = {name: [Cell(**cell) for cell in values[name]] for name in ("prompts", "steps")}
            return cls(**values | cells)
        except (KeyError, TypeError) as error:
            raise FileError(f"{path} holds no profile: give another --profile") from error


def prompt_depth(schedule: Schedule, length: int) -> float:
    """Mean number of layers that the positions of a prompt run."""
    return sum(schedule.positions_per_layer(length, length)) / length


def cache_path(name: str, **facts: Any) -> Path:
    """File in the user's cache folder for the profile of a model; all ``facts`` that decide its speed name it."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return root / "skipdecode" / "profiles" / f"{Path(name).name}-{key}.json"


def predict_seconds(cells: Sequence[Cell], batch_size: int, length: int, depth: float) -> float:
    """Predicted seconds of a prompt's pass or a decode step, from cells of its kind.

    Raises UsageError if none of them has this batch size.
    """
    by_length: dict[float, dict[float, float]] = {}
    for cell in cells:
        if cell.batch_size == batch_size:
            points = by_length.setdefault(cell.length, {})
            points[cell.depth] = min(cell.seconds, points.get(cell.depth, cell.seconds))
    if not by_length:
        raise UsageError(f"the profile has no batch size {batch_size}: measure it on that machine")
    at_depth = {known: _line(points, depth) for known, points in by_length.items()}
    return _line(at_depth, length)


def _line(points: Mapping[float, float], x: float) -> float:
    """Value at ``x`` of the straight lines between points; outside, that of the outermost line, but at least 0."""
    xs = sorted(points)
    if len(xs) == 1:
        return points[xs[0]]
    right = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    low, high = xs[right - 1], xs[right]
    slope = (points[high] - points[low]) / (high - low)
    return max(points[low] + slope * (x - low), 0.0)
