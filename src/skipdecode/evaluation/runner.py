"""Quality x layers x clock x memory: one row per method and budget, each paired with the full model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import __version__
from ..core import checkpoint_config
from ..core.schedule import Schedule
from ..data.metrics import DEFAULT, Agreement, Metric, bootstrap
from ..data.tasks import Example, Task, subsample
from ..data.tokenization import encode_prompts
from ..errors import FileError, JobError, UsageError
from ..files import check_target, locked, read_json, write
from ..generation.generate import Decoding, Generated, generate_ids
from ..generation.loading import load, resolve
from ..methods import get_method
from ..provenance import fingerprint, identity
from .loss import batches_of, loss_by_position
from .timing import alternate, compare, forced, machine, typical_steps


@dataclass(frozen=True)
class Arm:
    """One method at one target speed-up, on one checkpoint."""

    method: str
    speedup: float
    model: str
    key: str  # names its file


def arms(methods: str, model: str, speedups: Sequence[float]) -> list[Arm]:
    """What ``skipdecode,d3,d3=DIR,static=DIR-{speedup}`` asks for; the full model comes first, once.

    A method without a checkpoint of its own runs on ``model``. Raises UsageError for what no method is called, and for
    methods that need a checkpoint per budget and are not given one.
    """
    wanted = [part.strip().partition("=") for part in methods.split(",") if part.strip()]
    full = next((own for name, _, own in wanted if name == "full" and own), model)
    result = [Arm("full", 1.0, full, "full-1x")]
    for name, _, own in wanted:
        method = get_method(name)
        if name == "full":
            continue
        if not method.one_checkpoint_for_all and "{speedup}" not in own:
            raise UsageError(f"{name} is a model per budget: give {name}=DIR-{{speedup}}")
        # On a checkpoint of its own, a method that serves every budget is worth a row at full depth too.
        own_full = method.fits_depths and own not in ("", full)
        again = sum(name == other for other, _, _ in wanted) > 1 and bool(own)
        for k in speedups:
            if k > 1 or own_full:
                key = f"{name}-{k:g}x" + ("-trained" if again else "")
                result.append(Arm(name, k, own.replace("{speedup}", f"{k:g}") or model, key))
    if len({arm.key for arm in result}) < len(result):
        raise UsageError("--methods names a method twice: it may stand once alone and once with a checkpoint")
    return result


@dataclass
class Bench:
    """What every arm is measured on. ``examples`` are scored; ``held_out`` sets lengths, thresholds and losses.

    Attributes:
        timing_rows: how many of the examples are timed, evenly drawn from them.
        repeats: rounds timed, the full model and the arm in turn.
        samples: corpora resampled for the intervals.
        options: as ``model.generate`` names them.
    """

    task: Task
    examples: Sequence[Example]
    held_out: Sequence[Example]
    batch_size: int = 32
    max_new_tokens: int = 0
    timing_rows: int = 64
    repeats: int = 5
    samples: int = 1000
    metrics: Sequence[Metric] = DEFAULT
    dtype: str = "auto"
    device: str | None = None
    options: dict[str, Any] = field(default_factory=lambda: {"do_sample": False})

    def __post_init__(self) -> None:
        self.max_new_tokens = self.max_new_tokens or self.task.max_new_tokens

    def generate(
        self,
        model: PreTrainedModel,
        tokens: PreTrainedTokenizerBase,
        examples: Sequence[Example],
        plan: Decoding,
        **options: Any,
    ) -> Generated:
        """Texts for these examples' prompts; ``options`` go before the bench's own."""
        ids = encode_prompts(tokens, [example.prompt for example in examples])
        options = {"max_new_tokens": self.max_new_tokens} | self.options | options
        return generate_ids(model, tokens, ids, plan, self.batch_size, **options)

    def fingerprint(self) -> str:
        """What makes two measurements the same: rows, settings, machine and versions."""
        texts = [asdict(example) for example in (*self.examples, *self.held_out)]
        numbers = (self.batch_size, self.max_new_tokens, self.timing_rows, self.repeats, self.samples)
        names = [repr(vars(metric) | {"name": metric.name}) for metric in self.metrics]
        return fingerprint(
            texts, numbers, names, self.options, self.dtype, self.device, machine(self.device), __version__
        )


class Evaluation:
    """Runs arms, keeps each finished one in ``folder``: started again after a kill, it does only the rest.

    Two processes may fill one folder: a row is one's at a time, and the other waits for it.

    Args:
        bench: what to measure on.
        folder: gets ``rows/KEY.json``, the texts among them.
        on_start: is told each arm that really runs.
        overwrite: replace finished rows of other settings.
        say: is told of rows that are damaged or held by another process.
    """

    def __init__(
        self,
        bench: Bench,
        folder: Path,
        on_start: Callable[[Arm], object] = lambda arm: None,
        *,
        overwrite: bool = False,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.bench = bench
        self.folder = folder
        self.on_start = on_start
        self.overwrite = overwrite
        self.say = say
        self._loaded: dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]] = {}
        self._lengths: list[int] = []
        self._reference_texts: list[str] = []
        self._steps = 1

    def job(self, arm: Arm, reference: Arm) -> str:
        """What makes two rows the same: settings, arm, and the models' files."""
        models = [identity(resolve(name)) for name in (arm.model, reference.model)]
        return fingerprint(self.bench.fingerprint(), asdict(arm), models)

    def check(self, wanted: Sequence[Arm]) -> None:
        """What :meth:`rows` would refuse, said before a model is loaded.

        Raises:
            FileError: a row cannot be written.
            JobError: a finished row of other settings is there, and ``overwrite`` is not set.
        """
        if (self.folder / "rows").is_dir():
            for arm in wanted:
                check_target(self._path(arm))
                self._finished(arm, self.job(arm, wanted[0]))

    def rows(self, wanted: Sequence[Arm]) -> Iterator[dict[str, Any]]:
        """One finished row per arm, in their order; the first is the full model that all are paired with."""
        reference = wanted[0]
        for arm in wanted:
            path, job = self._path(arm), self.job(arm, reference)
            path.parent.mkdir(parents=True, exist_ok=True)
            with ExitStack() as stack:
                try:
                    stack.enter_context(locked(path))
                except JobError as held:
                    self.say(f"{held}. Waiting")
                    stack.enter_context(locked(path, timeout=-1))
                row = self._finished(arm, job)
                if row is None:
                    self.on_start(arm)
                    text = json.dumps(_sealed({"job": job} | self._measure(arm, reference)), ensure_ascii=False)
                    write(path, text + "\n")
                    row = json.loads(text)
            if arm is reference:
                self._reference_texts, self._steps = row["texts"], row["timed_steps"]
            yield row

    def _path(self, arm: Arm) -> Path:
        return self.folder / "rows" / f"{arm.key}.json"

    def _finished(self, arm: Arm, job: str) -> dict[str, Any] | None:
        """The row of this very job, if it is there and whole. Raises JobError for another job's."""
        path = self._path(arm)
        if not path.exists():
            return None
        try:
            row = read_json(path)
        except FileError:
            row = None
        if not isinstance(row, dict) or row != _sealed(row):
            self.say(f"{path} is damaged or of an earlier version: it is measured again")
            return None
        if row["job"] != job and not self.overwrite:
            raise JobError(
                f"{path} was measured with other settings or another model: give another --output, or --overwrite"
            )
        return row if row["job"] == job else None

    def _load(self, name: str, reference: Arm) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        if name not in self._loaded:
            # The reference stays; of the others, the one in use.
            self._loaded = {k: v for k, v in self._loaded.items() if k == reference.model}
            self._loaded[name] = load(name, dtype=self.bench.dtype, device=self.bench.device)
        return self._loaded[name]

    def _lengths_of(self, reference: Arm) -> list[int]:
        """Decode steps of the full model's batches on the held-out prompts."""
        if not self._lengths:
            self._lengths = self.bench.generate(
                *self._load(reference.model, reference), self.bench.held_out, None
            ).lengths
        return self._lengths

    def _plan(self, arm: Arm, reference: Arm) -> tuple[Decoding, dict[str, Any]]:
        """How to decode, and what of it to write down."""
        model, tokens = self._load(arm.model, reference)
        some = subsample(self.bench.held_out, 2 * self.bench.batch_size)
        return get_method(arm.method).decoding(
            model,
            arm.speedup,
            lambda: self._lengths_of(reference),
            lambda decoding: self.bench.generate(model, tokens, some, decoding).cost,
            **self.bench.options,
        )

    def _measure(self, arm: Arm, reference: Arm) -> dict[str, Any]:
        bench, method = self.bench, get_method(arm.method)
        full, full_tokens = self._load(reference.model, reference)
        model, tokens = self._load(arm.model, reference)
        layers = full.config.get_text_config(decoder=True).num_hidden_layers
        plan, written = self._plan(arm, reference)
        result = bench.generate(model, tokens, bench.examples, plan)
        texts = [" ".join(row.text.split()) for row in result.completions]
        cost = result.cost
        ready = method.is_trained_by(checkpoint_config.trained_method(model.config))
        row: dict[str, Any] = {
            "method": arm.method,
            "label": method.label if ready else f"{method.label}, untrained",
            "model": arm.model,
            "target": arm.speedup,
            "layers": round(cost.average_depth, 3),
            "layer_ratio": round(layers / cost.average_depth, 3),
            "token_layer_ratio": round(layers / cost.row_depth, 3),
            "prompt_layers": cost.num_layers,
            "tokens": cost.tokens,
            "steps": cost.steps,
            "peak_kv_bytes": cost.peak_kv_bytes,
        }
        row |= self._scores(texts, self._reference_texts or texts) | written
        answered = [example for example in bench.held_out if example.references]
        if answered and not callable(plan):
            schedule = plan if isinstance(plan, Schedule) else Schedule.full(cost.num_layers)
            batches = batches_of(answered, tokens, model, bench.batch_size)
            loss, row["loss_by_position"] = loss_by_position(model, batches, schedule)
            row["loss"] = round(loss, 4)
        if arm is reference:
            self._steps = typical_steps(result.lengths)
        timed, same = subsample(bench.examples, bench.timing_rows), forced(self._steps)
        runs: dict[str, Callable[[], Generated]] = {
            "full": lambda: bench.generate(full, full_tokens, timed, None, **same),
            "arm": lambda: bench.generate(model, tokens, timed, plan, **same),
        }
        if arm is reference:
            del runs["arm"]
        with locked(self.folder / "rows" / "clock", timeout=-1):  # nobody else's row is timed meanwhile
            timing = alternate(runs, bench.repeats)
        clock = compare(timing["full"], timing.get("arm", timing["full"]), bench.repeats)
        return row | {
            "timed_steps": self._steps,
            "timed_rows": clock.rows,
            "timed_batches": clock.batches,
            "timed_layer_ratio": round(clock.layer_ratio, 3),
            "seconds_per_1k_tokens": round(clock.seconds_per_1k, 4),
            "full_seconds_per_1k_tokens": round(clock.full_seconds_per_1k, 4),
            "clock_ratio": round(clock.ratio, 3),
            "step_ms": round(clock.step_ms, 3),
            "full_step_ms": round(clock.full_step_ms, 3),
            "decode_clock_ratio": round(clock.decode_ratio, 3),
            "texts": texts,
        }

    def _scores(self, texts: Sequence[str], stock: Sequence[str]) -> dict[str, Any]:
        """Each metric, how far it is from the full model's, and the 95% interval of that."""
        count = len(texts)
        result: dict[str, Any] = {}
        for metric in self.bench.metrics:
            own = isinstance(metric, Agreement)
            references = [[text] for text in stock] if own else [example.references for example in self.bench.examples]
            mine, theirs = metric.rows(texts, references), metric.rows(stock, references)
            score, base = metric.corpus(mine.sum(0), count), metric.corpus(theirs.sum(0), count)
            low, high = bootstrap(metric, mine, theirs, self.bench.samples)
            result |= {
                metric.name: round(score, 2),
                f"{metric.name}_difference": round(score - base, 2),
                f"{metric.name}_interval": [round(low, 2), round(high, 2)],
            }
        return result


def _sealed(row: dict[str, Any]) -> dict[str, Any]:
    """The row with a checksum: a kill, a full disk or a stray edit shows."""
    return row | {"checksum": fingerprint({name: value for name, value in row.items() if name != "checksum"})}
