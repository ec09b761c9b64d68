"""Measure quality, layers, wall clock and memory of methods and schedules, as ``skipdecode evaluate`` does.

from skipdecode.evaluation.evaluate import EvaluationPlan, evaluate

results = evaluate(EvaluationPlan("demo", task=get_task("e2e"), data=Path("e2e"), speedups=(2, 5)))
results.rows[1]["step_layer_ratio"]
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.chat import texts_for_a_chat_model
from ..data.collator import batches_of
from ..data.inputs import read_examples
from ..data.metrics import DEFAULT, Agreement, Metric, Repetition, distinct, paired_scores
from ..data.tasks import Example, Task, get_task, subsample
from ..data.tokenize import encode_prompts
from ..errors import FileError, ModelError, UsageError
from ..files import check_target, locked, read_json, write
from ..generation.batch import Decoding
from ..generation.generate import generate_ids, max_positions
from ..generation.stats import Completion, GenerationOutput
from ..latency.timing import alternate, compare, forced, typical_steps
from ..loading.device import machine, placement
from ..loading.load import adapter_of, identity_of, load, load_tokenizer, read_config, resolve
from ..loading.optimize import check_optimizations, optimizations
from ..model.adapter import check_learnt, trained_schedule
from ..model.attach import attach
from ..model.config import (
    DEFAULT_METHOD,
    config_schedules,
    num_layers,
    schedule_for,
    trained_method,
    trained_schedules,
    untrained_warning,
)
from ..model.inspect import text_config
from ..model.teacher_forcing import PrefilledBatch
from ..provenance import fingerprint
from ..schedule import Schedule
from . import report
from .divergence import damage
from .loss import response_loss, text_loss
from .plots import draw_tradeoff
from .variants import Variant, variants

FILES = (*report.FILES, "tradeoff.png")
Say = Callable[[str], object]

#: Increase it when the keys of a row change: rows of another version are refused without ``overwrite``.
ROW_VERSION = 7
#: Largest number of validation inputs used for lengths, CALM's threshold and the loss.
HELD_OUT_ROWS = 256


@dataclass(frozen=True)
class EvaluationPlan:
    """Settings of an evaluation.

    Args:
        model: directory, hub name or ``demo``: the full model, also used by each method that names no checkpoint.
        data: folder with the task's files, hub name, or one file of inputs, in which prompts are enough.
        task: how inputs are prompted and scored.
        speedups: target layer ratios of every method; None: those that ``model`` or a method's checkpoint was trained
            for, else 1 to 5.
        methods: as :func:`skipdecode.evaluation.variants.variants` takes them.
        schedules: JSON files of further schedules to evaluate.
        output: folder for tables, a plot and finished table rows.
        limit: largest number of inputs to score, and of inputs to hold out.
        batch_size: prompts decoded together.
        max_new_tokens: None: the task's.
        timing_rows: number of inputs to time, evenly drawn.
        repeats: timed rounds; each runs the full model and the variant once.
        dtype, device: as :func:`skipdecode.load` takes them; ``auto`` is for all models what it is for the full one.
        faster: the options ``quantization`` and ``prepack`` of :func:`skipdecode.load`, for all models alike.
        overwrite: replace results of other settings or models in ``output``.

    Raises:
        UsageError: a value is out of range.
    """

    model: str
    data: Path = Path(".")
    task: Task = field(default_factory=lambda: get_task("jsonl"))
    speedups: Sequence[float] | None = None
    methods: str = "skipdecode"
    schedules: Sequence[Path] = ()
    output: Path = Path("evaluation")
    limit: int | None = None
    batch_size: int = 32
    max_new_tokens: int | None = None
    timing_rows: int = 64
    repeats: int = 5
    dtype: str = "auto"
    device: str | None = None
    faster: Mapping[str, Any] = field(default_factory=dict)
    overwrite: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "faster", optimizations(**self.faster))
        for name in ("data", "output"):  # strings are paths too
            object.__setattr__(self, name, Path(getattr(self, name)))
        if (given := self.speedups) is not None and (not given or not min(given) >= 1 or len({*given}) < len(given)):
            raise UsageError(f"speedups are distinct numbers of at least 1, not {given}")
        for name in ("limit", "batch_size", "max_new_tokens", "timing_rows", "repeats"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is at least 1, not {value}")


@dataclass(frozen=True)
class Results:
    """The results of an evaluation.

    Attributes:
        rows: one table row per variant, the full model first, with the keys of ``table.json`` and the texts.
        metrics: (key in the table rows, display name) of each score.
        about: the notes below the tables, which say how the figures were measured.
        files: paths of the tables and the plot.
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
    """Measure quality, layers, wall clock and memory of every variant, and write tables and a plot to ``plan.output``.

    A later call with the same plan resumes: it measures only the variants whose table row is not in ``plan.output``.

    Args:
        plan: the settings.
        command: the command line to name in the tables.
        say: called with each warning for the user.
        on_progress: called with the key of the current variant, the number of finished variants, and of all.

    Raises:
        SkipDecodeError: data, models or options are unusable, or the output has other settings; raised before any
            weights are loaded.
    """
    if plan.output.exists() and not plan.output.is_dir():
        raise FileError(f"{plan.output} is a file: give a folder for --output")
    examples, held_out = _read(plan, say)
    selected = _select(plan)
    if told := texts_for_a_chat_model(load_tokenizer(selected[0].model), [each.prompt for each in examples]):
        say(told)
    metrics = _metrics(examples, say)
    evaluation = Evaluation(plan, examples, held_out, selected, metrics, say=say)
    rows: list[dict[str, Any]] = []
    with locked(plan.output / "table.json", str(plan.output)):
        evaluation.check()
        for variant in selected:
            on_progress(variant.key, len(rows), len(selected))
            rows.append(evaluation.row(variant))
        on_progress(variant.key, len(rows), len(selected))
        labels = [(metric.name, metric.label) for metric in metrics]
        about = _about(plan, evaluation.where[0], len(examples), command) | report.notes(rows)
        report.save(rows, labels, about, plan.output)
        draw_tradeoff(rows, labels, plan.output / "tradeoff.png")
    return Results(rows, labels, about, [plan.output / name for name in FILES])


def _read(plan: EvaluationPlan, say: Say) -> tuple[list[Example], list[Example]]:
    """Return (examples to score, examples to hold out for lengths, thresholds and losses)."""
    examples = read_examples(plan.task, plan.data, "test", say)[: plan.limit]
    if not examples:
        raise UsageError(f"{plan.data} holds no test rows")
    count = min(plan.limit or HELD_OUT_ROWS, HELD_OUT_ROWS)
    held_out = [] if plan.data.is_file() else subsample(plan.task.read(plan.data, "validation"), count)
    if not held_out and any(example.references for example in examples):
        say("there is no other split to hold out: lengths and thresholds come from the scored rows")
    return examples, held_out or subsample(examples, count)


def _select(plan: EvaluationPlan) -> list[Variant]:
    """Return the variants to evaluate, after checking models, options and schedules against the configs."""
    speedups = plan.speedups or _known(plan)
    layers = num_layers(read_config(variants(plan.methods, plan.model, (2,))[0].model))
    speedups = speedups or [speedup for speedup in (1, 2, 3, 4, 5) if speedup <= layers]
    selected = variants(plan.methods, plan.model, speedups, plan.schedules)
    if max(speedups) > layers:
        raise UsageError(f"speed-ups go up to the model's number of layers, {layers}: {max(speedups):g} is more")
    for variant in selected:
        config = read_config(variant.model)
        folder = adapter_of(variant.model)
        if folder is not None and variant.schedule is not None:
            check_learnt(folder, variant.schedule, config)
        elif folder is not None and variant.method.name == DEFAULT_METHOD:
            trained_schedule(config, variant.speedup, folder)
        elif folder is not None and variant.method.skips:
            name, base = variant.method.name, resolve(variant.model)
            raise UsageError(f"{folder} was not trained for {name}: give {name}={base}, or a model that was")
        check_optimizations(variant.model, config, *_placement(plan, selected[0]), **plan.faster)
        if variant.schedule is not None:
            schedule_for(config, schedule=variant.schedule)
    return selected


def _placement(plan: EvaluationPlan, reference: Variant) -> tuple[str | torch.dtype, str]:
    """Return the dtype and device of all models: by themselves, a trained one would be float32 beside bfloat16."""
    config = read_config(reference.model)
    dtype, device = placement(config, plan.dtype, plan.device)
    return (config.dtype or torch.float32) if dtype == "auto" else dtype, device


def _known(plan: EvaluationPlan) -> list[float]:
    """Return the speed-ups that the first trained one of the plan's checkpoints knows; none without one."""
    trained = (config_schedules(read_config(variant.model)) for variant in variants(plan.methods, plan.model, (2,)))
    return next((sorted(schedules) for schedules in trained if schedules), [])


def _metrics(examples: Sequence[Example], say: Say) -> list[Metric]:
    """Return the metrics: against references if every example has one, else against the full model's texts."""
    scored = all(example.references for example in examples)
    if not scored and any(example.references for example in examples):
        say("not every row has a reference: texts are compared with the full model's own (agreement)")
    metrics: list[Metric] = [*DEFAULT] if scored else [Agreement(), Repetition()]
    for metric in metrics:  # raises before a model is loaded if a library is missing
        metric.score(["a text"], [["a text"]])
    return metrics


def _about(plan: EvaluationPlan, dtype: Any, count: int, command: str | None) -> dict[str, str]:
    """Return the settings that go below the tables, by name; ``count`` is the number of scored inputs."""
    return ({"command": command} if command else {}) | {
        "rows": f"{count} test inputs of {plan.task.name}, greedy, batch {plan.batch_size}",
        "machine": machine(plan.device),
        "weights": str(dtype).removeprefix("torch."),
        **({"made faster": str(dict(plan.faster))} if plan.faster else {}),
        "rounds": f"{plan.repeats}, the full model and the method in turn",
        "intervals": "95%, bootstrap over inputs, 1000 samples; of differences from the full model: paired",
    }


class Evaluation:
    """Measures variants, and saves each table row when it is finished, so that a later run measures only the rest.

    Args:
        plan: settings; the table row of a variant, with its texts, is saved as ``rows/KEY.json`` in ``plan.output``.
        examples: inputs to score and to time.
        held_out: inputs for lengths, CALM's threshold and losses.
        variants: variants to measure; the first is the reference that all are compared with.
        metrics: scores to compute, each with its difference from the reference.
        say: called with a message about each damaged file.
    """

    def __init__(
        self,
        plan: EvaluationPlan,
        examples: Sequence[Example],
        held_out: Sequence[Example],
        variants: Sequence[Variant],
        metrics: Sequence[Metric] = DEFAULT,
        *,
        say: Say = lambda line: None,
    ) -> None:
        self.plan = plan
        self.examples, self.held_out = examples, held_out
        self.variants, self.reference = variants, variants[0]
        self.metrics = metrics
        self.say = say
        self.where = _placement(plan, self.reference)
        self._folder = plan.output / "rows"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._loaded: dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]] = {}
        self._versions: dict[str, list[Any]] = {}  # by model name; looked up once
        self._lengths: list[int] = []
        self._reference_texts: list[str] = []
        self._steps = 1

    def job(self, variant: Variant) -> str:
        """Return a fingerprint of all that a table row depends on: inputs, settings, machine, variant, model files."""
        plan = self.plan
        for name in {variant.model, self.reference.model} - {*self._versions}:
            self._versions[name] = identity_of(name)
        models = [self._versions[name] for name in (variant.model, self.reference.model)]
        texts = [asdict(example) for example in (*self.examples, *self.held_out)]
        most = plan.max_new_tokens or plan.task.max_new_tokens
        numbers = [plan.batch_size, most, plan.timing_rows, plan.repeats]
        where = [str(self.where[0]), plan.device, dict(plan.faster), machine(plan.device), version("skipdecode")]
        scores = [metric.name for metric in self.metrics]
        chosen = [variant.method.name, variant.speedup, variant.model, variant.key, variant.schedule]
        return fingerprint(ROW_VERSION, texts, numbers, where, scores, chosen, models)

    def check(self) -> None:
        """Check, before a model is loaded, that :meth:`row` and the tables replace no other results.

        Raises:
            FileError: a file cannot be written.
            UsageError: a file has results of other settings, and ``overwrite`` is not set.
        """
        tables = [self.plan.output / name for name in FILES]
        for path in (*tables, *map(self._path, self.variants)):
            check_target(path)
        if any(path.exists() for path in tables) and not (self._path(self.reference).exists() or self.plan.overwrite):
            raise UsageError(
                f"{self.plan.output} holds tables or a plot not of these rows: give another --output, or --overwrite"
            )
        for variant in self.variants:
            self._finished(variant, self.job(variant))

    def row(self, variant: Variant) -> dict[str, Any]:
        """Return the table row of a variant, measured now or read from an earlier run; the reference's comes first."""
        job = self.job(variant)
        row = self._finished(variant, job)
        if row is None:
            text = json.dumps(_with_checksum({"job": job} | self._measure(variant)), ensure_ascii=False)
            write(self._path(variant), text + "\n")
            row = json.loads(text)
        if variant is self.reference:
            self._reference_texts, self._steps = row["texts"], row["timed_steps"]
        return row

    def _path(self, variant: Variant) -> Path:
        return self._folder / f"{variant.key}.json"

    def _finished(self, variant: Variant, job: str) -> dict[str, Any] | None:
        """Return the saved row of this job; None if it is missing or damaged. Raises UsageError for another job's."""
        path = self._path(variant)
        if not path.exists():
            return None
        row = None
        with suppress(FileError):
            row = read_json(path)
        if not isinstance(row, dict) or row != _with_checksum(row):
            self.say(f"{path} is damaged: it is measured again")
            return None
        if row["job"] != job and not self.plan.overwrite:
            raise UsageError(
                f"{path} was measured with other settings or another model: give another --output, or --overwrite"
            )
        return row if row["job"] == job else None

    def _model(self, name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Return a checkpoint's model and tokenizer; keep only the reference and the last one loaded in memory."""
        if name not in self._loaded:
            self._loaded = {k: v for k, v in self._loaded.items() if k == self.reference.model}
            dtype, device = self.where
            self._loaded[name] = load(name, dtype=dtype, device=device, **self.plan.faster)
        return self._loaded[name]

    def generate(self, name: str, examples: Sequence[Example], decoding: Decoding, **options: Any) -> GenerationOutput:
        """Generate greedy texts for the examples' prompts with the checkpoint ``name``.

        ``decoding`` (None: full depth) and ``options`` are as :func:`generate_ids` takes them.
        """
        model, tokenizer = self._model(name)
        ids = encode_prompts(tokenizer, [example.prompt for example in examples])
        most = self.plan.max_new_tokens or self.plan.task.max_new_tokens
        options = {"max_new_tokens": most, "do_sample": False} | options
        return generate_ids(model, tokenizer, ids, decoding, self.plan.batch_size, **options)

    def held_out_lengths(self) -> list[int]:
        """Return the decode steps of each batch when the full model generates from the held-out prompts."""
        if not self._lengths:
            self._lengths = self.generate(self.reference.model, self.held_out, None).lengths
        return self._lengths

    def _measure(self, variant: Variant) -> dict[str, Any]:
        """Measure the variant and return its table row; a ratio is the full model's figure divided by the variant's."""
        full_layers = num_layers(self._model(self.reference.model)[0].config)
        model, _ = self._model(variant.model)
        decoding: Decoding = variant.schedule
        notes = {"schedule": variant.schedule.to_dict()} if variant.schedule else {}
        if variant.schedule is None:
            some = subsample(self.held_out, 2 * self.plan.batch_size)
            decoding, notes = variant.method.decoding(
                model,
                variant.speedup,
                self.held_out_lengths,
                lambda decoding: self.generate(variant.model, some, decoding).stats,
            )
        result = self.generate(variant.model, self.examples, decoding)
        cost, texts = result.stats, [completion.text for completion in result.completions]
        if variant is self.reference:
            self._steps = typical_steps(result.lengths)
        answered = [example for example in self.held_out if example.references]
        loss = {}
        # None: depths depend on the tokens.
        schedule = None if callable(decoding) else decoding or Schedule.full(num_layers(model.config))
        if answered and schedule:
            loss = self._told(variant, lambda: self._loss(variant.model, answered, schedule))
        if not all(example.references for example in self.examples):
            loss |= self._told(variant, lambda: self._distance(model, schedule, result.completions))
        trained = variant.method.is_trained_by(trained_method(model.config))
        if variant.schedule is None and isinstance(decoding, Schedule):
            trained = trained and untrained_warning(decoding, trained_schedules(model)) is None
        return {
            "method": variant.file or variant.method.name,
            "label": variant.label + ("" if trained else ", untrained"),
            "model": variant.model,
            "target": variant.speedup,
            "step_layers": round(cost.average_depth, 3),
            "prompt_layers": round(cost.prompt_depth, 3),
            "step_layer_ratio": round(full_layers / cost.average_depth, 3),
            "token_layer_ratio": round(full_layers / cost.row_depth, 3),
            "job_layer_ratio": round(full_layers / cost.job_depth, 3),
            "tokens": cost.tokens,
            "steps": cost.steps,
            "peak_kv_bytes": cost.peak_kv_bytes,
            **self._scores(texts),
            **notes,
            **loss,
            **self._clock(variant, decoding),
            "texts": texts,
        }

    def _told(self, variant: Variant, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return columns; none, and a message, if a model cannot be measured so: other rows are to go on."""
        try:
            return measure()
        except ModelError as error:
            self.say(f"{variant.label} at {variant.speedup:g}x: {error}")
            return {}

    def _loss(self, name: str, answered: Sequence[Example], schedule: Schedule) -> dict[str, Any]:
        """Return, as a column, the loss on people's responses; none if all are too long."""
        model, tokenizer = self._model(name)
        batches = batches_of(answered, tokenizer, self.plan.batch_size, max_positions(model.config), model.device)
        return {"loss": round(response_loss(model, batches, schedule), 4)} if batches else {}

    def _distance(
        self, model: PreTrainedModel, schedule: Schedule | None, completions: Sequence[Completion]
    ) -> dict[str, Any]:
        """Return, as columns, how far a model's texts and next tokens are from the full model's."""
        full, tokenizer = self._model(self.reference.model)
        size, prompts = self.plan.batch_size, [example.prompt for example in self.examples]
        found: dict[str, Any] = {
            "text_loss": text_loss(full, tokenizer, [*zip(prompts, completions, strict=True)], size),
            "distinct": distinct([completion.text for completion in completions]),
        }
        same_tokens = text_config(model.config).vocab_size == text_config(full.config).vocab_size
        # Where depths depend on the tokens, or the prompt leaves out layers, no one pass does what decoding does.
        if schedule and same_tokens and schedule.prompt_layers is None and not schedule.prompt_decay:
            texts = self._reference_texts or [completion.text for completion in completions]
            written = [Example(prompt, (text,)) for prompt, text in zip(prompts, texts, strict=True)]
            limit = max_positions(model.config)
            batches = batches_of(written, tokenizer, size, limit, model.device, as_written=True)
            passes = (PrefilledBatch(attach(model), batch) for batch in batches)
            with suppress(UsageError):  # texts of one token each have nothing to measure
                (here,) = damage(passes, [schedule], None if model is full else attach(full))
                found |= {"kl": here.kl, "top_1": 100 * here.agreement}
                if here.interval:
                    found["kl_interval"] = [round(end, 4) for end in here.interval]
        return {name: value if isinstance(value, list) else round(value, 4) for name, value in found.items()}

    def _scores(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return, as columns, each score, its difference from the reference's, and the difference's 95% interval."""
        full_texts = self._reference_texts or texts
        result: dict[str, Any] = {}
        for metric in self.metrics:
            agreement = isinstance(metric, Agreement)
            references = [[t] for t in full_texts] if agreement else [example.references for example in self.examples]
            (base, score), (low, high) = paired_scores(metric, [full_texts, texts], references)
            result |= {
                metric.name: round(score, 2),
                f"{metric.name}_difference": round(score - base, 2),
                f"{metric.name}_interval": [round(low, 2), round(high, 2)],
            }
        return result

    def _clock(self, variant: Variant, decoding: Decoding) -> dict[str, Any]:
        """Return the timing columns: variant and full model timed in turn, over equal numbers of decode steps."""
        timed, same = subsample(self.examples, self.plan.timing_rows), forced(self._steps)
        runs: dict[str, Callable[[], GenerationOutput]] = {
            "full": lambda: self.generate(self.reference.model, timed, None, **same),
            "skipping": lambda: self.generate(variant.model, timed, decoding, **same),
        }
        if variant is self.reference:
            del runs["skipping"]
        timing = alternate(runs, self.plan.repeats)
        full, skipping = timing["full"], timing.get("skipping", timing["full"])
        clock = compare(full, skipping)
        return {
            "timed_steps": self._steps,
            "timed_rows": skipping.stats.rows,
            "timed_batches": len(skipping.result.lengths) * self.plan.repeats,
            "timed_step_layer_ratio": round(clock.layer_ratio, 3),
            "timed_job_layer_ratio": round(full.stats.num_layers / skipping.stats.job_depth, 3),
            "job_seconds_per_1k_tokens": round(skipping.seconds_per_1k, 4),
            "full_job_seconds_per_1k_tokens": round(full.seconds_per_1k, 4),
            "job_clock_ratio": round(clock.ratio, 3),
            "step_ms": round(skipping.step_ms, 3),
            "full_step_ms": round(full.step_ms, 3),
            "step_clock_ratio": round(clock.decode_ratio, 3),
        }


def _with_checksum(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with a checksum, by which files that were cut short or edited are detected."""
    return row | {"checksum": fingerprint({name: value for name, value in row.items() if name != "checksum"})}
