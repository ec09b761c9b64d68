"""Generation jobs: a text for each row of a file. A killed job goes on where it stopped."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..data.chat import Prompt, as_json
from ..data.examples import read_rows
from ..data.tasks import Task, get_task
from ..data.tokenize import encode_prompts
from ..errors import DataError, UsageError
from ..files import Records, write
from ..loading.device import placement
from ..loading.load import Checkpoint
from ..model.config import untrained_warning
from ..schedule import Schedule
from .batches import max_positions, prompt_error, split_batches
from .generate import check_options, generate_ids, to_prompts, with_sampling
from .stats import Completion, GenerateBatch, GenerationOutput, GenerationStats

#: Columns of an output; an input's columns of these names are not copied.
OUTPUT_COLUMNS = ("text", "tokens", "finish_reason", "error")
#: Batches that vLLM gets at a time: when one text ends, the next begins. It pads nothing.
VLLM_BATCHES = 8


@dataclass(frozen=True)
class JobResult:
    """Result of a job, with its earlier, killed runs.

    Attributes:
        rows: columns of the input, and ``text``, ``tokens`` and ``finish_reason``, or ``error``; in the input's order.
        stats: of the whole job.
        schedule: that the texts were generated with.
    """

    rows: Sequence[Mapping[str, Any]]
    stats: GenerationStats
    schedule: Schedule

    @property
    def completions(self) -> list[Completion | None]:
        """Completions of the rows; None for a row with an error."""
        columns = OUTPUT_COLUMNS[:3]
        return [None if "error" in row else Completion(*(row[name] for name in columns)) for row in self.rows]

    @property
    def texts(self) -> list[str]:
        """Texts in the order of the input, without rows that have none."""
        return [row["text"] for row in self.rows if "error" not in row]

    @property
    def jsonl(self) -> str:
        """The output's lines."""
        return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in self.rows)

    @property
    def summary(self) -> dict[str, Any]:
        """Figures for JSON: those of the stats, ``bad_rows``, ``layers`` and ``target_speedup``."""
        return self.stats.summary() | {
            "bad_rows": sum("error" in row for row in self.rows),
            "layers": self.stats.num_layers,
            "target_speedup": self.schedule.target,
        }


@dataclass(frozen=True)
class GenerationJob:
    """A text for each row of a file, or for each of several prompts.

    With an output file, finished batches are kept in ``OUTPUT.partial``: a killed job that is run again loses and
    repeats none, and ends in the same bytes as an unbroken one.

    Args:
        checkpoint: the model.
        prompts: a file, whose rows the task makes prompts of; or texts and conversations, which are taken as they are.
        output: the JSONL file to write; None: only return the result.
        task: makes the prompts; default: any rows.
        speedup: target speed-up in layers; 1 is the full model. None: the slowest trained one above 1.
        schedule: a schedule in place of a speed-up.
        batch_size: most rows per batch. Batches hold rows of like length, the longest first.
        seed: of sampling; a text depends on its batch.
        options: of ``model.generate``; ``max_new_tokens`` is the task's by default.
        load: arguments of :meth:`Checkpoint.load`, such as ``dtype`` and ``device``.
        engine: ``transformers`` or ``vllm``.
        workers: number of workers on a Ray cluster; 0: this process.
        overwrite: replace an output that exists, or the progress of a job with other settings.
    """

    checkpoint: Checkpoint
    prompts: str | Path | Sequence[Any]
    output: str | Path | None = None
    task: Task = field(default_factory=get_task)
    speedup: float | None = None
    schedule: Schedule | None = None
    batch_size: int = 32
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    load: Mapping[str, Any] = field(default_factory=dict)
    engine: str = "transformers"
    workers: int = 0
    overwrite: bool = False

    def run(
        self,
        *,
        on_start: Callable[[int, int], object] = lambda total, done: None,
        on_batch: Callable[[GenerationStats], object] = lambda stats: None,
        say: Callable[[str], object] = lambda message: None,
    ) -> JobResult:
        """Generate the texts that no earlier run has generated, and write the output.

        ``on_start`` gets the number of rows that get a text, and of those that have one; ``on_batch`` the stats of each
        batch; ``say`` messages for the user.

        Raises:
            DataError: the input cannot be read, or a row is bad.
            UsageError: the output exists, or an earlier run had other settings; an option is not supported.
        """
        checkpoint = self.checkpoint
        options = {"max_new_tokens": self.task.max_new_tokens} | dict(self.options)
        most = options["max_new_tokens"]
        check_options(options, checkpoint.generation_config)
        schedule = self._schedule(say)
        if not schedule.is_full:
            options = with_sampling(checkpoint.sampling, options)
        rows, prompts = self._read()
        if checkpoint.tokenizer.chat_template is not None and any(isinstance(prompt, str) for prompt in prompts):
            say("prompts are texts: the chat model continues them; it answers rows with `messages`")
        if any(not isinstance(prompt, str) and prompt[-1].role == "assistant" for prompt in prompts):
            say("some conversations end with the assistant's message, which is continued")
        ids = encode_prompts(checkpoint.tokenizer, prompts)
        for row, prompt in zip(rows, ids, strict=True):
            if reason := prompt_error(checkpoint.config, prompt, most):
                row["error"] = reason
        good = [i for i, row in enumerate(rows) if "error" not in row]
        positions = max((len(ids[i]) for i in good), default=0) + most
        if positions > (max_positions(checkpoint.config) or math.inf):
            say(f"some rows need up to {positions} positions, more than the model was trained for")
        settings = {
            "model": checkpoint.fingerprint,
            "prompts": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
            "schedule": schedule.to_dict(),
            "options": options,
            **{name: getattr(self, name) for name in ("load", "batch_size", "seed", "engine")},
        }
        progress = Progress(self.output, settings, self.overwrite)
        size, steps = (self.batch_size * VLLM_BATCHES, math.inf) if self.engine == "vllm" else (self.batch_size, most)
        split = split_batches(checkpoint.config, [ids[i] for i in good], size, steps)
        batches = [[good[i] for i in batch] for batch in split]
        todo = {
            index: ([ids[i] for i in batch], self.seed + index)
            for index, batch in enumerate(batches)
            if index not in progress.batches
        }
        on_start(len(good), len(good) - sum(len(batch) for batch, _ in todo.values()))
        for index, output in self._generate(todo, schedule, options, positions) if todo else ():
            progress.add(index, output)
            on_batch(output.stats)
        stats = GenerationStats(checkpoint.num_layers)
        for index, batch in enumerate(batches):
            stats += progress.batches[index].stats
            for i, completion in zip(batch, progress.batches[index].completions, strict=True):
                rows[i] |= asdict(completion)
        result = JobResult(rows, stats, schedule)
        progress.finish(result.jsonl)
        return result

    def _schedule(self, say: Callable[[str], object]) -> Schedule:
        if self.schedule is not None and self.speedup is not None:
            raise UsageError("give one of speedup and schedule")
        schedule = self.checkpoint.schedule(self.speedup, self.schedule)
        if schedule.is_full and self.speedup is None and self.schedule is None:
            say(f"{self.checkpoint.name} was not trained to skip layers: it runs at 1x (--speedup changes that)")
        elif warning := untrained_warning(schedule, self.checkpoint.schedules):
            say(warning)
        return schedule

    def _read(self) -> tuple[list[dict[str, Any]], list[Prompt]]:
        """Columns to copy to the output, and the prompt, of each row."""
        if not isinstance(self.prompts, (str, Path)):
            prompts = to_prompts(self.prompts)
            return [{"prompt": as_json(prompt)} for prompt in prompts], prompts
        found: dict[Any, tuple[dict[str, Any], Prompt]] = {}
        for place, row in read_rows(self.prompts, self.task.text_column):
            try:
                prompt = self.task.example(row).prompt
            except DataError as error:
                raise DataError(f"{place}: {error}") from None
            columns = {name: value for name, value in row.items() if name not in OUTPUT_COLUMNS}
            if "text" in row and "prompt" not in row:
                columns = {"prompt": prompt} | columns
            found.setdefault(prompt if self.task.repeats else len(found), (columns, prompt))
        if not found:
            raise DataError(f"{self.prompts} holds no rows")
        return [columns for columns, _ in found.values()], [prompt for _, prompt in found.values()]

    def _generate(
        self, batches: Mapping[int, Any], schedule: Schedule, options: Mapping[str, Any], positions: int
    ) -> Iterator[tuple[int, GenerationOutput]]:
        if not self.workers:
            with start_engine(self, schedule, options, positions) as generate_batch:
                for index, batch in batches.items():
                    yield index, generate_batch(*batch)
            return
        from .ray import generate_on_ray

        dtype, device = placement(self.checkpoint.config, self.load.get("dtype", "auto"), self.load.get("device"))
        job = replace(self, load={**self.load, "dtype": str(dtype).removeprefix("torch."), "device": device})
        start = partial(start_engine, job, schedule, options, positions)
        yield from generate_on_ray(start, batches, self.workers, on_gpu=device != "cpu")


@contextmanager
def start_engine(
    job: GenerationJob, schedule: Schedule, options: Mapping[str, Any], positions: int
) -> Iterator[GenerateBatch]:
    """The job's engine, with the model loaded; ``positions`` is the most that a prompt and its text take."""
    if job.engine == "vllm":
        from .vllm import start_vllm

        with start_vllm(job.checkpoint, job.load, job.batch_size, schedule, options, positions) as generate_batch:
            yield generate_batch
        return
    tokenizer = job.checkpoint.tokenizer
    model = job.checkpoint.load(**job.load)
    yield lambda batch, seed: generate_ids(model, tokenizer, batch, schedule, len(batch), seed, **options)


class Progress:
    """Finished batches of a job, kept in ``OUTPUT.partial``. Without an output, nothing is kept."""

    def __init__(self, output: str | Path | None, settings: Mapping[str, Any], overwrite: bool) -> None:
        self.batches: dict[int, GenerationOutput] = {}
        self.output = None if output is None else Path(output)
        if self.output is None:
            return
        path = self.output.with_name(self.output.name + ".partial")
        if self.output.exists() and not path.exists() and not overwrite:
            raise UsageError(f"{self.output} exists: give --overwrite to replace it")
        self.records = Records(path, settings, overwrite)
        for value in self.records.values:
            completions = [Completion(**completion) for completion in value["completions"]]
            self.batches[value["batch"]] = GenerationOutput(GenerationStats(**value["stats"]), completions)

    def add(self, index: int, output: GenerationOutput) -> None:
        """Keep a finished batch."""
        self.batches[index] = output
        if self.output is not None:
            completions = [asdict(completion) for completion in output.completions]
            self.records.append({"batch": index, "completions": completions, "stats": asdict(output.stats)})

    def finish(self, content: str) -> None:
        """Write the output, all or nothing, and delete the progress."""
        if self.output is not None:
            write(self.output, content)
            self.records.path.unlink()
