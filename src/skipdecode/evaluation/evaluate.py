"""A whole evaluation from Python, as ``skipdecode evaluate`` runs it: read, check, measure, write tables and plots.

from skipdecode.evaluation.evaluate import EvaluationPlan, evaluate

results = evaluate(EvaluationPlan("demo", task=get_task("e2e"), data=Path("e2e"), speedups=(2, 5)))
results.rows[1]["step_layer_ratio"]
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.checkpoint_config import layer_count, schedule_for
from ..data.metrics import DEFAULT, Agreement, BertScore, Metric
from ..data.tasks import Example, Task, get_task, subsample
from ..errors import FileError, UsageError
from ..files import locked
from ..planning.clock import Clock
from ..planning.profile import Profile
from ..weights.device import cpu_capabilities, machine, placement
from ..weights.faster import check_faster, faster_options
from ..weights.loading import read_config
from . import report
from .arms import Arm, arms
from .bench import Bench
from .examples import read_examples
from .plots import draw_losses, draw_tradeoff
from .runner import Evaluation

Say = Callable[[str], object]


@dataclass(frozen=True)
class EvaluationPlan:
    """What to evaluate, on what, and how.

    Args:
        model: directory, hub name or ``demo``: the full model, and the checkpoint of methods without one of their own.
        data: folder with the task's files, hub name, or one file of rows, in which prompts are enough.
        task: how rows are prompted and scored.
        speedups: targets of every method.
        methods: as :func:`skipdecode.evaluation.arms.arms` takes them.
        schedules: JSON files, each of which gets a row.
        serving: the model's flat schedules, which suit servers, get rows beside the others.
        output: folder for tables, plots and finished rows.
        split: ``test`` or ``validation``.
        limit: score only the first so many inputs.
        held_out_rows: inputs of the validation split for lengths, CALM's threshold and the loss.
        batch_size: rows decoded together.
        max_new_tokens: None: the task's.
        timing_rows: inputs that are timed.
        repeats: rounds timed, the full model and each arm in turn.
        samples: corpora resampled for the confidence intervals.
        bert_score: directory or hub name of an encoder, to add BERTScore.
        dtype, device: as :func:`skipdecode.load` takes them.
        faster: what makes layers faster, as :func:`skipdecode.load` takes it (``quantization``, ``compile``,
            ``prepack``): of every row's model, the full one's too.
        clock, profile: what speed-ups are of: ``layers``; or, with what ``skipdecode profile`` measured here (or its
            file), the seconds of a decode ``step`` or of the ``job`` in the runs that are timed.
        overwrite: replace rows and tables of other settings or models.

    Raises:
        UsageError: a value that is out of range.
    """

    model: str
    data: Path = Path(".")
    task: Task = field(default_factory=lambda: get_task("jsonl"))
    speedups: Sequence[float] = (1, 2, 3, 4, 5)
    methods: str = "skipdecode"
    schedules: Sequence[Path] = ()
    serving: bool = False
    output: Path = Path("evaluation")
    split: str = "test"
    limit: int | None = None
    held_out_rows: int = 256
    batch_size: int = 32
    max_new_tokens: int | None = None
    timing_rows: int = 64
    repeats: int = 5
    samples: int = 1000
    bert_score: str | None = None
    dtype: str = "auto"
    device: str | None = None
    faster: Mapping[str, Any] = field(default_factory=dict)
    clock: str = "layers"
    profile: Profile | str | Path | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "profile", Clock(self.clock, self.profile).profile)
        object.__setattr__(self, "faster", faster_options(**self.faster))
        for name in ("data", "output"):  # strings are paths too
            object.__setattr__(self, name, Path(getattr(self, name)))
        if self.split not in ("test", "validation"):
            raise UsageError(f"split is test or validation, not {self.split!r}")
        if not self.speedups or min(self.speedups) < 1 or len(set(self.speedups)) < len(self.speedups):
            raise UsageError(f"speedups are distinct numbers of at least 1, not {self.speedups}")
        if self.serving and self.clock != "layers":
            raise UsageError("serving compares flat schedules for speed-ups of layers: leave the clock out")
        for name in ("limit", "held_out_rows", "batch_size", "max_new_tokens", "timing_rows", "repeats", "samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is at least 1, not {value}")


@dataclass(frozen=True)
class Results:
    """A finished evaluation.

    Attributes:
        rows: one per arm, the full model's first, with the keys of ``table.json`` and the texts.
        metrics: (key in the rows, name for people) of each score.
        about: how the rows were measured, as it stands below the tables.
        files: what was written.
    """

    rows: list[dict[str, Any]]
    metrics: list[tuple[str, str]]
    about: dict[str, str]
    files: list[Path]


def evaluate(
    plan: EvaluationPlan,
    *,
    command: str | None = None,
    say: Say = warnings.warn,
    on_progress: Callable[[str, int, int], object] = lambda what, done, total: None,
) -> Results:
    """Measure quality, layers, wall clock and memory of every arm, and write tables and plots to ``plan.output``.

    It resumes after an interruption: finished rows are kept in ``plan.output``.

    Args:
        plan: what to evaluate.
        command: stands in the tables as what made them.
        say: called with a line about anything the user should know.
        on_progress: called with the arm under way, how many arms are finished, and how many there are.

    Raises:
        SkipDecodeError: data, models or options that cannot be used, or an output of other settings. All of this is
            said before a model is loaded.
    """
    if plan.output.exists() and not plan.output.is_dir():
        raise FileError(f"{plan.output} is a file: give a folder for --output")
    examples, held_out = _read(plan, say)
    selected = _arms(plan)
    metrics = _metrics(plan, examples, say)
    bench = Bench(
        plan.task,
        examples,
        held_out,
        batch_size=plan.batch_size,
        max_new_tokens=plan.max_new_tokens or 0,
        timing_rows=plan.timing_rows,
        repeats=plan.repeats,
        samples=plan.samples,
        metrics=metrics,
        dtype=plan.dtype,
        device=plan.device,
        faster=plan.faster,
        clock=Clock(plan.clock, plan.profile),
    )
    _check_clock(bench, selected)
    plan.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    evaluation = Evaluation(
        bench,
        selected,
        plan.output,
        lambda arm: on_progress(arm.key, len(rows), len(selected)),
        overwrite=plan.overwrite,
        say=say,
    )
    job, names = evaluation.job(selected[0]), [(arm.name, arm.speedup) for arm in selected]
    report.check(plan.output, job, names, plan.overwrite)
    evaluation.check()
    for arm, row in zip(selected, evaluation.rows(), strict=True):
        rows.append(row)
        on_progress(arm.key, len(rows), len(selected))
    labels = [(metric.name, metric.label) for metric in metrics]
    about = _about(plan, len(examples), command) | report.notes(rows)
    own = {arm.name for arm in selected if arm.method.takes_style}
    with locked(plan.output / "table.json", timeout=60):
        report.check(plan.output, job, names, plan.overwrite)
        report.save(rows, labels, about, plan.output, job)
        draw_tradeoff(rows, labels, plan.output / "tradeoff.png", about["machine"], own)
        draw_losses(rows, plan.output / "losses.png", about["machine"], own)
    files = [plan.output / name for name in report.FILES if (plan.output / name).exists()]
    return Results(rows, labels, about, files)


def _read(plan: EvaluationPlan, say: Say) -> tuple[list[Example], list[Example]]:
    """The rows to score, and the rows for lengths, thresholds and losses."""
    examples = read_examples(plan.task, plan.data, plan.split, say)[: plan.limit]
    if not examples:
        raise UsageError(f"{plan.data} holds no {plan.split} rows")
    held_out = [] if plan.data.is_file() else subsample(plan.task.read(plan.data, "validation"), plan.held_out_rows)
    if not held_out or plan.split == "validation":
        say("there is no other split to hold out: lengths and thresholds come from the scored rows")
    return examples, held_out or subsample(examples, plan.held_out_rows)


def _arms(plan: EvaluationPlan) -> list[Arm]:
    """The arms, whose models are there and have the layers for them."""
    selected = arms(plan.methods, plan.model, plan.speedups, plan.schedules, plan.serving)
    layers = layer_count(read_config(selected[0].model))
    if max(plan.speedups) > layers:
        raise UsageError(f"speed-ups go up to the model's number of layers, {layers}: {max(plan.speedups):g} is more")
    for arm in selected:
        config = read_config(arm.model)
        check_faster(arm.model, config, *placement(config, plan.dtype, plan.device), cpu_capabilities(), **plan.faster)
        if arm.schedule is not None:
            schedule_for(config, schedule=arm.schedule)
    return selected


def _check_clock(bench: Bench, selected: Sequence[Arm]) -> None:
    """Whether the arms' models run as they are to, and can have their speed-ups on the clock.

    Texts of the most tokens are looked at: what a job cannot have over them, it cannot have over shorter ones.

    Raises UsageError, ScheduleError.
    """
    for arm in selected:
        if bench.faster.get("compile") and arm.method.skips and not arm.method.fits_depths:
            raise UsageError(f"{arm.method.name} decides by token which layers run: its steps cannot be compiled")
        bench.planned(arm, max(bench.max_new_tokens - 1, 1))


def _metrics(plan: EvaluationPlan, examples: Sequence[Example], say: Say) -> list[Metric]:
    """Scores against references where every row has one, else against the full model's texts."""
    scored = all(example.references for example in examples)
    if not scored:
        say("not every row has a reference: texts are compared with the full model's own (agreement)")
        if plan.bert_score:
            raise UsageError("BERTScore compares with references: every row needs one")
    metrics: list[Metric] = [*DEFAULT] if scored else [Agreement()]
    if plan.bert_score:
        metrics.append(BertScore(plan.bert_score))
    for metric in metrics:  # a library or an encoder that is missing shows before a model is loaded
        metric.score(["a text"], [["a text"]])
    return metrics


def _about(plan: EvaluationPlan, count: int, command: str | None) -> dict[str, str]:
    """How it was measured."""
    return ({"command": command} if command else {}) | {
        "rows": f"{count} {plan.split} inputs of {plan.task.name}, greedy, batch {plan.batch_size}",
        "machine": machine(plan.device),
        **({"made faster": str(dict(plan.faster))} if plan.faster else {}),
        **({"targets": f"of a {plan.clock}'s seconds in the timed runs"} if plan.clock != "layers" else {}),
        "rounds": f"{plan.repeats}, the full model and the method in turn",
        "vs full": f"paired bootstrap over inputs, {plan.samples} samples",
    }
