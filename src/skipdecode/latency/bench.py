"""Time generation at full depth and at target speed-ups alternately, for several batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import ScheduleError, UsageError
from ..generation.generate import generate_ids
from ..loading.device import machine
from ..model.config import layer_count
from ..model.inspect import text_config
from ..schedule import Schedule
from .planner import Predictor, Workload
from .profile import Profile, shape_of
from .profiler import check_positions
from .resolve import new_schedule
from .tables import Row
from .timing import alternate, compare, forced


@dataclass(frozen=True)
class BenchPlan:
    """Settings of a benchmark.

    Args:
        speedups: targets; full depth is always timed too.
        batch_sizes: numbers of prompts decoded together.
        prompt_tokens, new_tokens: tokens of each prompt and of each text; no text ends early.
        clock: unit of the targets: ``layers``, ``step`` (seconds per decode step) or ``job`` (prompt and decode steps).
        profile: plans the targets in seconds; with any clock, it adds predictions to the report.
        repeats: timed rounds; each runs full depth and every target once, and the report has medians.
        style: fields of the schedules: ``decay``, ``prompt_layers``, …

    Raises:
        UsageError: values contradict each other or are out of range, or the profile does not cover a batch size.
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
        if self.clock != "layers" and self.profile is None:
            raise UsageError(f"speed-ups of a {self.clock} are planned with a profile: skipdecode profile measures one")
        if not self.speedups or min(self.speedups) < 1 or not self.batch_sizes or self.repeats < 1:
            raise UsageError("speed-ups are numbers of at least 1, and a batch size and a round are needed")
        for size in self.batch_sizes:
            self.predictor(size)

    def predictor(self, batch_size: int) -> Predictor | None:
        """Return the predictor for a batch size; None without a profile. Raises UsageError beyond its sizes."""
        work = Workload(batch_size, self.prompt_tokens, self.new_tokens)
        clock = "step" if self.clock == "layers" else self.clock
        return None if self.profile is None else Predictor(self.profile, [work], clock)


def bench(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    plan: BenchPlan,
    name: str,
    *,
    options: Mapping[str, Any] | None = None,
    command: str = "",
    on_run: Callable[[], object] = lambda: None,
) -> tuple[list[Row], dict[str, str]]:
    """Time full depth and every target at every batch size.

    Args:
        model, tokenizer: from :func:`skipdecode.load` or :func:`skipdecode.latency.model_shapes.random_model`.
        plan: the settings.
        name: name of the model for the report.
        options: options that the model was loaded with, except dtype and device; compared with the profile's.
        command: command line for the report.
        on_run: called after each run.

    Returns:
        Plain values of each batch size and target, where a ratio is full depth's figure divided by the row's; and notes
        for below their table, among them why a target cannot be had.

    Raises:
        UsageError: the model has too few positions, or the profile has another machine, model, dtype or options.
    """
    here, kind, options = machine(str(model.device)), str(model.dtype).removeprefix("torch."), dict(options or {})
    check_positions(model.config, plan.prompt_tokens + plan.new_tokens)
    if plan.profile is not None:
        shape = shape_of(model.config)
        plan.profile.check(shape=shape, machine=here, device=model.device.type, dtype=kind, options=options)
    rows = [row for size in plan.batch_sizes for row in _batch(model, tokenizer, plan, size, on_run)]
    about = {
        "model": name,
        "command": command,
        "machine": here,
        "dtype": ", ".join([kind, *(f"{name} {value}" for name, value in options.items())]),
        "job": f"{plan.prompt_tokens} prompt tokens and {plan.new_tokens} new ones in each row, end-of-sequence "
        "suppressed",
        "rounds": f"{plan.repeats} after one to warm up, all speeds of a batch size in turn, medians",
        "ratios": "full depth's figure over the row's: layers per decode step, seconds of a step, seconds of the job",
    }
    refused = [f"batch {row['batch_size']}: {row['refused']}" for row in rows if "refused" in row]
    return rows, about | {f"refused {number}": text for number, text in enumerate(refused, 1)}


def _batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    plan: BenchPlan,
    size: int,
    on_run: Callable[[], object],
) -> list[Row]:
    """Time full depth and every target speed-up at one batch size; ``on_run`` is called after each run.

    Returns:
        One row for full depth and each target; where a target cannot be had, ``refused`` says why in place of figures.
    """
    predictor = plan.predictor(size)
    basis = [plan.new_tokens - 1] if predictor is None or plan.clock == "layers" else predictor
    schedules = {1.0: Schedule.full(layer_count(model.config))}
    refused: dict[float, str] = {}
    for asked in dict.fromkeys(k for k in plan.speedups if k != 1):
        try:
            schedules[asked] = new_schedule(model.config, asked, basis, **plan.style)
        except ScheduleError as error:
            refused[asked] = str(error)
    vocabulary = text_config(model.config).vocab_size
    generator = torch.Generator().manual_seed(size)
    ids = torch.randint(vocabulary // 8, vocabulary, (size, plan.prompt_tokens), generator=generator).tolist()
    options: dict[str, Any] = forced(plan.new_tokens - 1) | {"do_sample": False}
    runs = {k: partial(generate_ids, model, tokenizer, ids, s, size, **options) for k, s in schedules.items()}
    timings = alternate(runs, plan.repeats, on_run)
    rows: list[Row] = []
    for asked in dict.fromkeys((1.0, *plan.speedups)):
        row: dict[str, Any] = {"batch_size": size, "asked": asked, "asked_of": plan.clock}
        if asked in refused:
            rows.append(row | {"refused": refused[asked]})
            continue
        schedule, timing = schedules[asked], timings[asked]
        cost, ratios = timing.cost, compare(timings[1.0], timing)
        row |= {
            "max_depth": schedule.max_depth,
            "min_depth": schedule.min_depth,
            "prompt_layers": schedule.deepest,
            "average_depth": round(cost.average_depth, 3),
            "layers_ratio": round(cost.layer_ratio, 3),
            "step_ratio": round(ratios.decode_ratio, 3),
            "job_ratio": round(ratios.ratio, 3),
            "step_ms": round(timing.step_ms, 3),
            "prompt_ms": round(1e3 * (timing.seconds - timing.decode_seconds), 1),
            "job_seconds": round(timing.seconds, 4),
            "tokens_per_second": round(cost.tokens / timing.seconds, 2),
            "peak_kv_bytes": cost.peak_kv_bytes,
        }
        if predictor is not None:
            predicted = predictor.ratios(schedule)
            row |= {f"predicted_{of}_ratio": round(predicted[of], 3) for of in ("step", "job")}
        rows.append(row)
    return rows


#: Column heads of the table; :func:`cells_of` returns the cells.
HEADS = (
    "batch", "asked", "depths", "prompt", "layers", "step predicted", "step got", "job predicted", "job got",
    "ms / step", "ms prompt", "tokens / s", "peak KV",
)  # fmt: skip


def cells_of(row: Row) -> list[str]:
    """Return the cells of a table row as text, in the order of :data:`HEADS`."""
    start = [str(row["batch_size"]), f"{row['asked']:g}x {row['asked_of']}" if row["asked"] != 1 else "full depth"]
    if "refused" in row:
        return [*start, "cannot be had", *[""] * (len(HEADS) - 3)]

    def ratio(name: str) -> str:
        return f"{row[name]:.2f}x" if name in row else ""

    return [
        *start,
        f"{row['max_depth']} to {row['min_depth']}",
        str(row["prompt_layers"]),
        *map(ratio, ("layers_ratio", "predicted_step_ratio", "step_ratio", "predicted_job_ratio", "job_ratio")),
        f"{row['step_ms']:.1f}",
        f"{row['prompt_ms']:.0f}",
        f"{row['tokens_per_second']:.1f}",
        f"{row['peak_kv_bytes'] / 1e6:.1f} MB",
    ]
