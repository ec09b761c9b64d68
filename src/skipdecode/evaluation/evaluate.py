"""Quality, layers, time and memory of the full model, of each speed, and of the paper's baseline."""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from ..data.collator import batches_of
from ..data.examples import merge_references, read_examples, subsample
from ..data.metrics import DEFAULT, Agreement, Metric, Repetition, paired_scores
from ..data.tasks import Example, Task, get_task
from ..data.tokenize import encode_prompts
from ..errors import UsageError
from ..files import Records
from ..generation.batches import max_positions
from ..generation.generate import Decoding, generate_ids
from ..generation.stats import GenerationOutput
from ..latency.timing import alternate, compare, forced, typical_steps
from ..loading.device import machine, placement
from ..loading.load import Checkpoint
from ..model.adapter import TEXTS
from ..model.config import trained_method
from ..model.teacher_forcing import PrefilledBatch
from ..schedule import Schedule, choose_schedule
from . import report
from .divergence import divergence, loss_under

#: File in the output folder to which each finished row is appended; its first line holds the settings.
ROWS = "rows.jsonl"
#: Labels of the methods that an evaluation compares with the full model.
METHODS = {"skipdecode": "SkipDecode", "multi_exit": "multi-layer exit"}
#: Increase it when the keys of a row change.
VERSION = 9

OnProgress = Callable[[str, int, int], object]


@dataclass(frozen=True)
class EvaluateConfig:
    """Settings of an evaluation, which the help of ``skipdecode evaluate`` explains, and two for Python.

    Args:
        data: also a Hub name; prompts are enough.
        speedups: target speed-ups in layers; None: the trained ones, else 1 to 5.
        timing_examples: number of examples to time.
        dtype, device, quantization: as :func:`skipdecode.load` takes them, for all models alike.
    """

    model: str
    adapter: str | Path | None = None
    data: str | Path = "."
    task: str | Task = "jsonl"
    speedups: Sequence[float] | None = None
    methods: Sequence[str] = ()
    reference: str | None = None
    output: str | Path = "evaluation"
    limit: int | None = None
    batch_size: int = 32
    max_new_tokens: int | None = None
    timing_examples: int = 64
    timing_rounds: int = 5
    dtype: str = "auto"
    device: str | None = None
    quantization: str | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class Variant:
    """A model at one speed: a row of the table."""

    key: str  #: Unique name of the row.
    checkpoint: Checkpoint
    method: str
    speedup: float  #: Target, in layers.
    schedule: Schedule | None  #: Which layers run; None: all of them.
    label: str  #: Name in tables.
    depths_fixed: ClassVar[bool] = True  #: Whether depths do not depend on tokens, as one pass over a text needs.

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that a saved row must share with the variant."""
        schedule = None if self.schedule is None else self.schedule.to_dict()
        fields = {"key": self.key, "method": self.method, "speedup": self.speedup, "schedule": schedule}
        return fields | {"model": self.checkpoint.fingerprint}

    @contextmanager
    def decoding(self, model: Any, horizon: int, generate: Callable[[Any], GenerationOutput]) -> Iterator[Any]:
        """Context of the row's generation: its ``decoding``, and columns of its own. Other methods override it.

        Args:
            model: the variant's, loaded.
            horizon: decode steps of the full model's longest text.
            generate: generates some of the texts, to choose settings by.
        """
        yield self.schedule, {"schedule": self.schedule.to_dict()} if self.schedule else {}


@dataclass(frozen=True)
class Results:
    """Results of an evaluation."""

    rows: list[dict[str, Any]]  #: One per variant, the full model first, with the keys of ``table.json`` and the texts.
    about: dict[str, str]  #: Notes below the tables on how they were measured.


def evaluate(
    config: EvaluateConfig,
    variants: Sequence[Variant] | None = None,
    *,
    command: str | None = None,
    say: Callable[[str], object] = warnings.warn,
    on_progress: OnProgress = lambda what, done, total: None,
) -> Results:
    """Measure every variant, and write rows, tables and a plot to ``config.output``.

    Each finished row is saved: a second call with the same settings measures only what is missing.

    Args:
        config: the settings.
        variants: what to measure instead of the config's model, speeds and methods; the first is the full model.
        command: command line to name in the tables.
        say: receives messages for the user.
        on_progress: called with what is measured, and how many of its batches are done.

    Raises:
        UsageError: the output holds rows of other settings.
        ScheduleError: a schedule does not fit its model, or its adapter was not trained for it.
        DataError: the data cannot be read, or is empty.
    """
    variants = list_variants(config) if variants is None else variants
    for each in variants:
        if each.schedule is not None:  # refused here, and not after the full model was measured
            each.checkpoint.schedule(given=each.schedule)
    evaluation = _Evaluation(config, variants[0], say, on_progress)
    saved = {row["variant"]["key"]: row for row in evaluation.records.values}
    rows: list[dict[str, Any]] = []
    for variant in variants:
        row = saved.get(variant.key, {"variant": None})
        rows.append(row if row["variant"] == variant.identity else evaluation.measure(variant, rows))
    about = evaluation.about(command) | report.notes(rows)
    report.save(rows, about, Path(config.output))
    report.plot_tradeoff(rows, Path(config.output) / "tradeoff.png")
    return Results(rows, about)


def list_variants(config: EvaluateConfig) -> list[Variant]:
    """Variants that a config names: the full model, and each method at each speed."""
    checkpoint = Checkpoint.resolve(config.model, config.adapter)
    full = checkpoint if config.reference is None else Checkpoint.resolve(config.reference)
    trained, layers = checkpoint.schedules, checkpoint.num_layers
    by = "skipdecode" if checkpoint.adapter else trained_method(checkpoint.config)
    speedups = config.speedups or sorted(trained) or [speedup for speedup in (1, 2, 3, 4, 5) if speedup <= layers]
    if config.reference is None:
        speedups = [speedup for speedup in speedups if speedup != 1]  # the first row
    variants = [Variant("full-1x", full, "full", 1.0, None, "full model")]
    for method in dict.fromkeys(config.methods or ["skipdecode" if by == "full" else by]):
        if method not in METHODS:
            raise UsageError(f"unknown method {method}: give {', '.join(METHODS)}")
        learned = by == method
        own = trained if learned else {}
        style = {"order": "bottom"} if method == "multi_exit" and not learned else {}
        for speedup in dict.fromkeys(speedups):
            schedule = choose_schedule(own, layers, speedup, **style)
            label = METHODS[method] + ("" if speedup in own else ", untrained")
            variants.append(Variant(f"{method}-{speedup:g}x", checkpoint, method, float(speedup), schedule, label))
    return variants


class _Evaluation:
    def __init__(self, config: EvaluateConfig, full: Variant, say: Any, on_progress: OnProgress) -> None:
        self.config = config
        self.full = full
        self.on_progress = on_progress
        self.task = get_task(config.task) if isinstance(config.task, str) else config.task
        self.examples = merge_references(read_examples(config.data, self.task, references=False))[: config.limit]
        self.scored = all(example.references for example in self.examples)
        if not self.scored and any(example.references for example in self.examples):
            say("some rows have no reference: texts are compared with the full model's instead")
        self._warn_of_learned_prompts(say)
        self.metrics: list[Metric] = list(DEFAULT) if self.scored else [Agreement(), Repetition()]
        self.dtype, self.device = placement(full.checkpoint.config, config.dtype, config.device)
        options: Any = {"dtype": self.dtype, "device": self.device, "quantization": config.quantization}
        self.load = lru_cache(maxsize=2)(partial(Checkpoint.load, **options))  # the full model and a variant's
        self.max_new_tokens = config.max_new_tokens or self.task.max_new_tokens
        path = Path(config.output) / ROWS
        path.parent.mkdir(parents=True, exist_ok=True)
        if config.overwrite:
            path.unlink(missing_ok=True)
        self.records = Records(path, self.settings)

    def _warn_of_learned_prompts(self, say: Any) -> None:
        texts = Path(self.full.checkpoint.adapter or "") / TEXTS
        learned = {each.prompt for each in read_examples(texts, get_task())} if texts.is_file() else set()
        if count := sum(example.prompt in learned for example in self.examples):
            say(f"the adapter learned from {count} of these {len(self.examples)} prompts: others may come out worse")

    @property
    def settings(self) -> dict[str, Any]:
        """JSON values that all rows of a table must share."""
        texts = json.dumps([asdict(example) for example in self.examples])
        names = ("batch_size", "timing_examples", "timing_rounds", "quantization")
        return {
            "version": VERSION,
            "full model": self.full.checkpoint.fingerprint,
            "examples": hashlib.sha256(texts.encode()).hexdigest()[:16],
            "max_new_tokens": self.max_new_tokens,
            "dtype": str(self.dtype).removeprefix("torch."),
            "machine": machine(self.device),
        } | {name: getattr(self.config, name) for name in names}

    def measure(self, variant: Variant, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Row of a variant, which is appended to the saved ones. ``rows`` are those before it, the full model's first.

        Each ratio is the full model's figure divided by the variant's.
        """
        self.load(self.full.checkpoint)  # first, so that another variant's model gives way
        model = self.load(variant.checkpoint)
        some = partial(self._generate, variant, subsample(self.examples, 2 * self.config.batch_size))
        with variant.decoding(model, rows[0]["longest_steps"] if rows else 1, some) as (decoding, notes):
            progress = self._counter(variant.key, -(-len(self.examples) // self.config.batch_size))
            output = self._generate(variant, self.examples, decoding, on_batch=progress)
            steps = rows[0]["timed_steps"] if rows else typical_steps(output.lengths)
            timing = self._timing(variant, decoding, steps)
        stats = output.stats
        texts = [completion.text for completion in output.completions]
        full_texts = rows[0]["texts"] if rows else texts
        layers = self.full.checkpoint.num_layers
        row = {
            "variant": variant.identity,
            "method": variant.method,
            "label": variant.label,
            "model": Path(variant.checkpoint.name).name,  # a local path means nothing elsewhere
            "target": variant.speedup,
            "step_layers": round(stats.average_depth, 3),
            "prompt_layers": round(stats.prompt_depth, 3),
            "step_layer_ratio": round(layers / stats.average_depth, 3),
            "token_layer_ratio": round(layers / stats.row_depth, 3),
            "job_layer_ratio": round(layers / stats.job_depth, 3),
            "tokens": stats.tokens,
            "steps": stats.steps,
            "longest_steps": max(*output.lengths, 1),
            "peak_kv_bytes": stats.peak_kv_bytes,
            "peak_memory_bytes": stats.peak_memory_bytes,
            **self._scores(texts, full_texts),
            **notes,
            **({} if self.scored else self._distances(variant, output, full_texts)),
            **timing,
            "texts": texts,
        }
        self.records.append(row)
        return row

    def _generate(
        self, variant: Variant, examples: Sequence[Example], decoding: Decoding, **options: Any
    ) -> GenerationOutput:
        """Greedy texts for the examples' prompts; ``decoding`` and ``options`` as :func:`generate_ids` takes them."""
        tokenizer = variant.checkpoint.tokenizer
        ids = encode_prompts(tokenizer, [example.prompt for example in examples])
        options = {"max_new_tokens": self.max_new_tokens, "do_sample": False} | options
        model = self.load(variant.checkpoint)
        return generate_ids(model, tokenizer, ids, decoding, self.config.batch_size, **options)

    def _scores(self, texts: Sequence[str], full_texts: Sequence[str]) -> dict[str, Any]:
        """Each score, its difference from the full model's, and the difference's 95% interval."""
        scores: dict[str, Any] = {}
        given, full = [example.references for example in self.examples], [(text,) for text in full_texts]
        for metric in self.metrics:
            references = full if isinstance(metric, Agreement) else given
            (base, score), (low, high) = paired_scores(metric, [full_texts, texts], references)
            scores |= {
                metric.name: round(score, 2),
                f"{metric.name}_difference": round(score - base, 2),
                f"{metric.name}_interval": [round(low, 2), round(high, 2)],
            }
        return scores

    def _distances(self, variant: Variant, output: GenerationOutput, full_texts: Sequence[str]) -> dict[str, Any]:
        """Loss of the variant's texts under the full model; KL and top-1 agreement on the full model's texts."""
        model, full = self.load(variant.checkpoint), self.load(self.full.checkpoint)
        tokenizer = self.full.checkpoint.tokenizer
        size = self.config.batch_size
        prompts = [example.prompt for example in self.examples]
        found: dict[str, Any] = {"text_loss": round(loss_under(full, tokenizer, prompts, output.completions, size), 4)}
        schedule = variant.schedule or Schedule.full(variant.checkpoint.num_layers)
        # One pass does what decoding does if depths do not depend on tokens, and the prompt runs all layers.
        if variant.depths_fixed and schedule.prompt_layers is None and not schedule.prompt_decay:
            examples = [Example(prompt, (text,)) for prompt, text in zip(prompts, full_texts, strict=True)]
            batches = batches_of(examples, tokenizer, size, max_positions(model.config), model.device, as_written=True)
            prefilled = (PrefilledBatch(model, batch) for batch in batches)
            (near,) = divergence(prefilled, [schedule], None if model is full else full)
            found |= {"kl": round(near.kl, 4), "top_1": round(100 * near.top1, 4)}
            if near.interval:
                found["kl_interval"] = [round(end, 4) for end in near.interval]
        return found

    def _timing(self, variant: Variant, decoding: Decoding, steps: int) -> dict[str, Any]:
        """Timing columns: variant and full model in turn, over equal numbers of decode steps."""
        examples = subsample(self.examples, self.config.timing_examples)
        rounds = self.config.timing_rounds
        runs = {"full": partial(self._generate, self.full, examples, None, **forced(steps))}
        if variant is not self.full:
            runs["variant"] = partial(self._generate, variant, examples, decoding, **forced(steps))
        timings = alternate(runs, rounds, on_run=self._counter(f"{variant.key}, timing", len(runs) * (rounds + 1)))
        full = timings["full"]
        timed = timings.get("variant", full)
        speedups = compare(full, timed)
        return {
            "timed_steps": steps,
            "timed_rows": timed.stats.rows,
            "timed_batches": len(timed.output.lengths) * rounds,
            "timed_step_layer_ratio": round(speedups.layers, 3),
            "job_seconds_per_1k_tokens": round(timed.seconds_per_1k, 4),
            "full_job_seconds_per_1k_tokens": round(full.seconds_per_1k, 4),
            "job_clock_ratio": round(speedups.end_to_end, 3),
            "step_ms": round(timed.step_ms, 3),
            "full_step_ms": round(full.step_ms, 3),
            "step_clock_ratio": round(speedups.decoding, 3),
        }

    def _counter(self, what: str, total: int) -> Callable[..., object]:
        """Function that reports one more unit of ``total`` at each call."""
        done = count(1)
        self.on_progress(what, 0, total)
        return lambda *_: self.on_progress(what, next(done), total)

    def about(self, command: str | None) -> dict[str, str]:
        """Notes below the tables."""
        config = self.config
        notes = {
            "command": command,
            "rows": f"{len(self.examples)} test inputs of {self.task.name}, greedy, batch {config.batch_size}",
            "machine": machine(self.device),
            "weights": self.settings["dtype"],
            "quantization": config.quantization,
            "rounds": f"{config.timing_rounds}, the full model and the row's in turn",
            "intervals": "95%, bootstrap over inputs, 1000 samples; of differences from the full model: paired",
        }
        return {name: note for name, note in notes.items() if note}
