"""Full depth and faster budgets timed alternately, batch size by batch size: what was asked for, and what was got."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core.checkpoint_config import layer_count
from ..core.schedule import Schedule
from ..core.stack import decoder_layers, text_config, with_lenders_first
from ..errors import ScheduleError, UsageError
from ..generation.generate import generate_ids
from ..planning.planner import CLOCKS, Prediction, Predictor, Workload, predict
from ..planning.profile import Profile
from ..planning.resolve import new_schedule
from ..weights.device import Peaks, resident_bytes
from .timing import Clock, Timing, alternate, compare, forced


@dataclass(frozen=True)
class BenchPlan:
    """What to time.

    Args:
        speedups: targets; full depth is timed beside them in any case.
        batch_sizes: rows decoded together.
        prompt_tokens, new_tokens: of each row; no text ends early.
        clock: what the targets are of: ``layers``, ``step`` (a decode step's seconds) or ``job`` (prompt and steps).
        profile: what the last two are planned with. With any clock, predictions stand beside what was measured.
        repeats: rounds timed, all speeds in turn; medians count.
        style: fields of the schedules: ``order``, ``decay``, ``prompt_layers``, …

    Raises:
        UsageError: values that contradict each other or are out of range.
    """

    speedups: Sequence[float] = (1.0, 2.0, 3.0, 5.0)
    batch_sizes: Sequence[int] = (1, 8, 32)
    prompt_tokens: int = 64
    new_tokens: int = 128
    clock: str = "layers"
    profile: Profile | None = None
    repeats: int = 3
    style: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.clock not in CLOCKS:
            raise UsageError(f"a clock is {', '.join(CLOCKS)}, not {self.clock!r}")
        if self.clock != "layers" and self.profile is None:
            raise UsageError(f"speed-ups of a {self.clock} are planned with a profile: skipdecode profile measures one")
        if not self.speedups or min(self.speedups) < 1 or not self.batch_sizes or self.repeats < 1:
            raise UsageError("speed-ups are numbers of at least 1, and a batch size and a round are needed")
        for size in self.batch_sizes:
            self.workload(size)

    def workload(self, batch_size: int) -> Workload:
        """What a batch of so many rows does."""
        return Workload(batch_size, self.prompt_tokens, self.new_tokens)

    def check(self, config: Any) -> None:
        """Whether a model of this config has the positions, and the profile the batches. Raises UsageError."""
        if self.profile is not None:
            for size in self.batch_sizes:
                Predictor(self.profile, [self.workload(size)])
        room = getattr(text_config(config), "max_position_embeddings", None)
        if room is not None and self.prompt_tokens + self.new_tokens > room:
            raise UsageError(f"{self.prompt_tokens} prompt tokens and {self.new_tokens} new ones: the model has {room}")

    def schedule(self, config: Any, speedup: float, batch_size: int) -> Schedule:
        """The schedule for one cell. Raises ScheduleError where the clock cannot give the speed-up."""
        if speedup == 1:
            return Schedule.full(layer_count(config))
        work = self.workload(batch_size)
        if self.clock == "layers" or self.profile is None:
            return new_schedule(config, speedup, [work.steps], **self.style)
        return new_schedule(config, speedup, Predictor(self.profile, [work], self.clock), **self.style)


@dataclass(frozen=True)
class Cell:
    """One batch size at one target.

    Attributes:
        batch_size, asked: which one.
        schedule: None where the target cannot be had.
        why: then, the reason.
        timing, clock: measured; ``clock`` is against full depth of the same batch size.
        prediction: of the profile, if there is one.
        weight_bytes: bytes of weights that a decode step reads, on average.
        parameters: weights that a decode step multiplies with, on average.
        resident_bytes: memory of the process after a run, its cache freed; 0 where psutil is not installed.
    """

    batch_size: int
    asked: float
    schedule: Schedule | None = None
    why: str = ""
    timing: Timing | None = None
    clock: Clock | None = None
    prediction: Prediction | None = None
    weight_bytes: float = 0.0
    parameters: float = 0.0
    resident_bytes: int = 0

    def row(self, plan: BenchPlan, peaks: Peaks) -> dict[str, Any]:
        """Plain values. Ratios are full depth's figure over this one's: of layers, of a decode step, of the job."""
        start = {"batch_size": self.batch_size, "asked": self.asked, "asked_of": plan.clock}
        if self.schedule is None or self.timing is None or self.clock is None:
            return start | {"refused": self.why}
        cost, seconds = self.timing.cost, self.timing.step_ms / 1e3
        read = (
            self.weight_bytes + cost.peak_kv_bytes * cost.average_depth / self.schedule.max_depth
        )  # about the average
        predicted = self.prediction
        row = start | {
            "max_depth": self.schedule.max_depth,
            "min_depth": self.schedule.min_depth,
            "prompt_layers": self.schedule.deepest,
            "average_depth": round(cost.average_depth, 3),
            "layers_ratio": round(cost.layer_ratio, 3),
            "step_ratio": round(self.clock.decode_ratio, 3),
            "job_ratio": round(self.clock.ratio, 3),
            "step_ms": round(self.timing.step_ms, 3),
            "prompt_ms": round(1e3 * (self.timing.seconds - self.timing.decode_seconds), 1),
            "job_seconds": round(self.timing.seconds, 4),
            "tokens_per_second": round(cost.tokens / self.timing.seconds, 2),
            "bandwidth_share": round(read / seconds / peaks.bandwidth, 3),
            "matrix_share": round(2 * self.parameters * self.batch_size / seconds / peaks.matrix, 3),
            "peak_kv_bytes": cost.peak_kv_bytes,
            "resident_bytes": self.resident_bytes,
        }
        if predicted is not None:
            row |= {"predicted_step_ratio": round(predicted.step, 3), "predicted_job_ratio": round(predicted.job, 3)}
        return row


def bench(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    plan: BenchPlan,
    on_run: Callable[[], object] = lambda: None,
) -> list[Cell]:
    """Time every target at every batch size, full depth beside it. ``on_run``: called after each timed run."""
    plan.check(model.config)
    cells = []
    for size in plan.batch_sizes:
        schedules: dict[float, Schedule | str] = {}
        for asked in dict.fromkeys((1.0, *plan.speedups)):
            try:
                schedules[asked] = plan.schedule(model.config, asked, size)
            except ScheduleError as error:
                schedules[asked] = str(error)
        cells += _batch(model, tokenizer, plan, size, schedules, on_run)
    return cells


def runs_of(plan: BenchPlan) -> int:
    """How many runs are made at most."""
    return len({1.0, *plan.speedups}) * len(plan.batch_sizes) * (plan.repeats + 1)


def _batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    plan: BenchPlan,
    size: int,
    schedules: Mapping[float, Schedule | str],
    on_run: Callable[[], object],
) -> list[Cell]:
    vocabulary = text_config(model.config).vocab_size
    generator = torch.Generator().manual_seed(size)
    ids = torch.randint(vocabulary // 8, vocabulary, (size, plan.prompt_tokens), generator=generator).tolist()
    options: dict[str, Any] = forced(plan.new_tokens - 1) | {"do_sample": False}
    resident: dict[float, int] = {}

    def run(asked: float, schedule: Schedule) -> Any:
        result = generate_ids(model, tokenizer, ids, schedule, size, **options)
        resident[asked] = max(resident.get(asked, 0), resident_bytes())
        return result

    had = {asked: schedule for asked, schedule in schedules.items() if isinstance(schedule, Schedule)}
    timings = alternate({asked: partial(run, asked, s) for asked, s in had.items()}, plan.repeats, on_run)
    predictor = Predictor(plan.profile, [plan.workload(size)]) if plan.profile else None
    cells = []
    for asked, schedule in schedules.items():
        if isinstance(schedule, str):
            cells.append(Cell(size, asked, why=schedule))
            continue
        timing = timings[asked]
        depth = timing.cost.average_depth
        cells.append(
            Cell(
                size,
                asked,
                schedule,
                timing=timing,
                clock=compare(timings[1.0], timing, plan.repeats),
                prediction=predict(predictor, asked, schedule) if predictor else None,
                weight_bytes=_per_step(model, schedule, depth, lambda p: p.numel() * p.element_size()),
                parameters=_per_step(model, schedule, depth, lambda p: p.numel()),
                resident_bytes=resident[asked],
            )
        )
    return cells


def _per_step(model: PreTrainedModel, schedule: Schedule, depth: float, count: Callable[[Tensor], int]) -> float:
    """What the weights of the head and of the layers that run count together, in a step of average depth."""
    layers = decoder_layers(model)
    ranked = [layers[i] for i in with_lenders_first(schedule, model.config).ranking]
    sums = [sum(map(count, _weights(layer))) for layer in ranked]
    whole = int(depth)
    running = sum(sums[:whole]) + (depth - whole) * (sums[whole] if whole < len(sums) else 0)
    head = model.get_output_embeddings()
    return running + (sum(map(count, _weights(head))) if head is not None else 0)


def _weights(module: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(module.parameters(), module.buffers())  # int8 weights are buffers
