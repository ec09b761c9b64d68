"""Runs what is compared: quality x layers x clock x memory, one row per arm, each paired with the full model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..clock.timing import alternate, compare, forced, typical_steps
from ..core.checkpoint_config import layer_count, trained_method
from ..core.schedule import Schedule
from ..data.metrics import Agreement, bootstrap
from ..data.tasks import subsample
from ..errors import FileError, JobError
from ..files import check_target, locked, read_json, write
from ..generation.batch import Decoding
from ..generation.results import Cost, Generated
from ..provenance import fingerprint, identity
from ..weights.loading import load, read_config, resolve
from .arms import Arm
from .bench import Bench
from .loss import batches_of, loss_by_position

#: Of a row's keys: rows of another form are not taken for finished ones.
FORM = 2

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


class Models:
    """Checkpoints, loaded when they are first asked for. One stays; of the others only the one in use does."""

    def __init__(self, stays: str, bench: Bench) -> None:
        self._stays = stays
        self._bench = bench
        self._loaded: dict[str, Loaded] = {}

    def __getitem__(self, name: str) -> Loaded:
        if name not in self._loaded:
            self._loaded = {k: v for k, v in self._loaded.items() if k == self._stays}
            self._loaded[name] = load(name, dtype=self._bench.dtype, device=self._bench.device, **self._bench.faster)
        return self._loaded[name]


class Evaluation:
    """Measures arms and keeps each finished row in ``folder``: started again after a kill, it measures only the rest.

    Two processes may fill one folder. A row is measured by one process at a time, and the other waits for it.

    Args:
        bench: what to measure on.
        arms: what to measure. The first is the reference, which all are paired with.
        folder: gets ``rows/KEY.json`` for each arm, with the texts in it.
        on_start: called with each arm that is not already finished.
        overwrite: replace finished rows of other settings.
        say: called with a line about each row that is damaged or held by another process.
    """

    def __init__(
        self,
        bench: Bench,
        arms: Sequence[Arm],
        folder: Path,
        on_start: Callable[[Arm], object] = lambda arm: None,
        *,
        overwrite: bool = False,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.bench = bench
        self.arms = list(arms)
        self.reference = self.arms[0]
        self.folder = folder
        self.on_start = on_start
        self.overwrite = overwrite
        self.say = say
        self.models = Models(self.reference.model, bench)
        self._versions: dict[str, list[Any]] = {}  # of models, looked up once
        self._lengths: list[int] = []
        self._reference_texts: list[str] = []
        self._steps = 1

    def job(self, arm: Arm) -> str:
        """What makes two rows the same: settings, arm, and the models' files."""
        for name in {arm.model, self.reference.model} - {*self._versions}:
            # A hub name alone does not say which version it is.
            self._versions[name] = [identity(resolve(name)), getattr(read_config(name), "_commit_hash", None)]
        models = [self._versions[name] for name in (arm.model, self.reference.model)]
        return fingerprint(FORM, self.bench.fingerprint(), arm.identity(), models)

    def check(self) -> None:
        """What :meth:`rows` would refuse, said before a model is loaded.

        Raises:
            FileError: a row cannot be written.
            JobError: a finished row of other settings is there, and ``overwrite`` is not set.
        """
        if (self.folder / "rows").is_dir():
            for arm in self.arms:
                check_target(self._path(arm))
                self._finished(arm, self.job(arm))

    def rows(self) -> Iterator[dict[str, Any]]:
        """One finished row per arm, in their order.

        Raises ScheduleError: after the first row, where the clock cannot give an arm its speed-up in the timed runs.
        """
        for arm in self.arms:
            path, job = self._path(arm), self.job(arm)
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
                    text = json.dumps(_sealed({"job": job} | self._measure(arm)), ensure_ascii=False)
                    write(path, text + "\n")
                    row = json.loads(text)
            if arm is self.reference:
                self._reference_texts, self._steps = row["texts"], row["timed_steps"]
                # A speed-up that cannot be had over so many steps shows before rows are measured.
                for each in self.arms:
                    self.bench.planned(each, self._steps)
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

    def _held_out_lengths(self) -> list[int]:
        """Decode steps of the full model's batches on the held-out prompts."""
        if not self._lengths:
            self._lengths = self.bench.generate(*self.models[self.reference.model], self.bench.held_out, None).lengths
        return self._lengths

    def _decoding(self, arm: Arm) -> tuple[Decoding, dict[str, Any]]:
        """How the arm decodes, and what of it to write down."""
        if arm.schedule is not None:
            return arm.schedule, {"schedule": arm.schedule.to_dict()}
        schedule = self.bench.planned(arm, self._steps)
        if schedule is not None:
            return schedule, {"schedule": schedule.to_dict(), "target_of": self.bench.clock.name}
        model, tokenizer = self.models[arm.model]
        some = subsample(self.bench.held_out, 2 * self.bench.batch_size)
        return arm.method.decoding(
            model,
            arm.speedup,
            self._held_out_lengths,
            lambda decoding: self.bench.generate(model, tokenizer, some, decoding).cost,
            **self.bench.options,
        )

    def _measure(self, arm: Arm) -> dict[str, Any]:
        """Everything that stands in the arm's row."""
        full, _ = self.models[self.reference.model]
        model, tokenizer = self.models[arm.model]
        decoding, notes = self._decoding(arm)
        result = self.bench.generate(model, tokenizer, self.bench.examples, decoding)
        texts = [" ".join(completion.text.split()) for completion in result.completions]
        if arm is self.reference:
            self._steps = typical_steps(result.lengths)
        trained = arm.method.is_trained_by(trained_method(model.config))
        return {
            "method": arm.name,
            "label": arm.label if trained else f"{arm.label}, untrained",
            "model": arm.model,
            "target": arm.speedup,
            **_layers(result.cost, layer_count(full.config)),
            **scores(self.bench, texts, self._reference_texts or texts),
            **notes,
            **self._loss(model, tokenizer, decoding),
            **self._clock(arm, decoding),
            "texts": texts,
        }

    def _loss(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, decoding: Decoding) -> dict[str, Any]:
        """Teacher-forced loss on held-out responses; nothing where there are none, or depths are not known before."""
        answered = [example for example in self.bench.held_out if example.references]
        if not answered or callable(decoding):
            return {}
        batches = batches_of(answered, tokenizer, model, self.bench.batch_size)
        schedule = decoding or Schedule.full(layer_count(model.config))
        loss, by_position = loss_by_position(model, batches, schedule)
        return {"loss_by_position": by_position, "loss": round(loss, 4)}

    def _clock(self, arm: Arm, decoding: Decoding) -> dict[str, Any]:
        """The arm and the full model, timed in turn over equal numbers of decode steps."""
        bench = self.bench
        timed, same = subsample(bench.examples, bench.timing_rows), forced(self._steps)
        runs: dict[str, Callable[[], Generated]] = {
            "full": lambda: bench.generate(*self.models[self.reference.model], timed, None, **same),
            "arm": lambda: bench.generate(*self.models[arm.model], timed, decoding, **same),
        }
        if arm is self.reference:
            del runs["arm"]
        with locked(self.folder / "rows" / "clock", timeout=-1):  # nobody else's row is timed meanwhile
            timing = alternate(runs, bench.repeats)
        own = timing.get("arm", timing["full"])
        clock = compare(timing["full"], own, bench.repeats)
        return {
            "timed_steps": self._steps,
            "timed_rows": clock.rows,
            "timed_batches": clock.batches,
            "timed_step_layer_ratio": round(clock.layer_ratio, 3),
            "timed_job_layer_ratio": round(timing["full"].cost.num_layers / own.cost.job_depth, 3),
            "job_seconds_per_1k_tokens": round(clock.seconds_per_1k, 4),
            "full_job_seconds_per_1k_tokens": round(clock.full_seconds_per_1k, 4),
            "job_clock_ratio": round(clock.ratio, 3),
            "step_ms": round(clock.step_ms, 3),
            "full_step_ms": round(clock.full_step_ms, 3),
            "step_clock_ratio": round(clock.decode_ratio, 3),
        }


def _layers(cost: Cost, full_layers: int) -> dict[str, Any]:
    """What the texts took; ratios are the full model's layers over these."""
    return {
        "step_layers": round(cost.average_depth, 3),
        "prompt_layers": round(cost.prompt_depth, 3),
        "step_layer_ratio": round(full_layers / cost.average_depth, 3),
        "token_layer_ratio": round(full_layers / cost.row_depth, 3),
        "job_layer_ratio": round(full_layers / cost.job_depth, 3),
        "tokens": cost.tokens,
        "steps": cost.steps,
        "peak_kv_bytes": cost.peak_kv_bytes,
    }


def scores(bench: Bench, texts: Sequence[str], reference_texts: Sequence[str]) -> dict[str, Any]:
    """Each of the bench's metrics, its difference from the full model's, and the 95% interval of that difference."""
    count = len(texts)
    result: dict[str, Any] = {}
    for metric in bench.metrics:
        agreement = isinstance(metric, Agreement)
        references = [[t] for t in reference_texts] if agreement else [example.references for example in bench.examples]
        own, full = metric.rows(texts, references), metric.rows(reference_texts, references)
        score, base = metric.corpus(own.sum(0), count), metric.corpus(full.sum(0), count)
        low, high = bootstrap(metric, own, full, bench.samples)
        result |= {
            metric.name: round(score, 2),
            f"{metric.name}_difference": round(score - base, 2),
            f"{metric.name}_interval": [round(low, 2), round(high, 2)],
        }
    return result


def _sealed(row: dict[str, Any]) -> dict[str, Any]:
    """The row with a checksum: a kill, a full disk or a stray edit shows."""
    return row | {"checksum": fingerprint({name: value for name, value in row.items() if name != "checksum"})}
