"""A generation job: generate a text for every item of an input. Bad items are found before weights are loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..data.chat import Message, Prompt, as_json, render, texts_for_a_chat_model
from ..data.inputs import Item, read_items, to_item
from ..data.tasks import Task, get_task
from ..data.tokenize import encode_prompts
from ..errors import ModelError, UsageError
from ..files import check_target, is_stream, write
from ..latency.old_planner import CLOCKS, Predictor, workloads
from ..latency.old_profile import Profile, check_profile
from ..latency.resolve import new_schedule
from ..loading.device import placement
from ..loading.load import adapter_of, identity_of, load_tokenizer, read_config, read_generation_config
from ..model.adapter import check_learnt
from ..model.config import config_schedules, num_layers, schedule_for, untrained_warning
from ..provenance import fingerprint
from ..schedule import Schedule, parse_prompt_layers
from .engine import Engine, EngineConfig, Transformers
from .generate import max_positions, position_limit, to_prompts
from .journal import Journal
from .options import check_options, check_with_model, given, given_schedule, num_beams
from .stats import Completion, GenerationStats


def _ignore(*_: Any) -> None:
    """Do nothing: the default callback."""


@dataclass(frozen=True)
class JobResult:
    """The result of a job.

    Attributes:
        items: all items of the input; ``error`` says what is wrong with a bad one.
        completions: by index of their item; bad items have none.
        summary: figures of the job with its earlier, killed runs: :meth:`GenerationStats.summary`, ``bad_rows``
            (items), ``target_speedup`` and ``target_of`` (layers, step or job), and ``layers`` (of the model).
    """

    items: Sequence[Item]
    completions: Mapping[int, Completion]
    summary: Mapping[str, Any]

    @property
    def texts(self) -> list[str]:
        """Return the texts in the order of the input, without bad items."""
        return [completion.text for _, completion in sorted(self.completions.items())]

    @property
    def jsonl(self) -> str:
        """Return the output: one line per item, in the order of the input, with the item's own columns."""
        made = [
            {column: as_json(value) for column, value in item.columns.items()}
            | ({"error": f"line {item.line}: {item.error}"} if item.error else asdict(self.completions[index]))
            for index, item in enumerate(self.items)
        ]
        return "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in made)


@dataclass(frozen=True)
class GenerationJob(EngineConfig):
    """Generate a text for every item of an input. With an output file, a killed job resumes where it stopped.

    Args:
        model: directory, hub name, or ``demo``; the other fields of :class:`~.engine.EngineConfig` are keywords.
        input: a file, ``-`` for standard input, or a list of conversations or texts; the task makes a prompt of each
            text, as of a line of a text file. Items in a list stay as they are.
        output: the JSONL file to write; None: only return the result. A pipe or a device is written at the end.
        task: reads items and makes their prompts; default: any JSONL.
        format: ``jsonl``, ``csv`` or ``text``, if the input's name does not tell.
        speedup, schedule: one of a target layer reduction (1: the unmodified model) and a schedule. Default: the
            schedule of the model's config.
        prompt_layers: the most layers that the prompt runs: a number, or ``max`` for as many as the first decode step.
            None: as trained, else all.
        profile: layer times that ``skipdecode profile`` measured on this machine. With it, ``clock`` says what
            ``speedup`` divides: seconds of a decode ``step``, or of the ``job`` if all texts have ``max_new_tokens``.
        overwrite: replace an existing output, finished or not.
        chat: treat each text as a user's message, and apply the tokenizer's chat template.
        engine: generates the texts; default: ``model.generate``; others are in :mod:`skipdecode.generation.engines`.

    ``options`` are those of ``model.generate``; without ``max_new_tokens``, the task's value is used.

    Raises:
        UsageError: arguments contradict each other.
    """

    model: str
    input: str | Path | Sequence[Any] = "-"
    output: str | Path | None = None
    task: Task = field(default_factory=lambda: get_task("jsonl"))
    format: str | None = None
    speedup: float | None = None
    schedule: Schedule | str | Path | None = None
    prompt_layers: int | str | None = None
    profile: Profile | str | Path | None = None
    overwrite: bool = False
    chat: bool = False
    engine: Engine = field(default_factory=Transformers)

    def __post_init__(self) -> None:
        schedule = given_schedule(self.speedup, self.schedule)
        if (self.schedule is not None or self.speedup == 1) and (
            self.prompt_layers is not None or self.clock != "layers"
        ):
            raise UsageError("prompt_layers and clock go with a speedup above 1, not with a schedule")
        if self.clock != "layers" and (self.speedup is None or self.offload is not None):
            raise UsageError("a clock needs a speedup, and layers in memory: a profile knows no offload")
        if self.clock not in CLOCKS:
            raise UsageError(f"a clock is {', '.join(CLOCKS)}, not {self.clock!r}")
        if (self.clock == "layers") != (self.profile is None):
            raise UsageError("the clocks step and job, and they only, need a profile: skipdecode profile measures one")
        profile = Profile.load(self.profile) if isinstance(self.profile, (str, Path)) else self.profile
        if not isinstance(profile, (Profile, type(None))):
            raise UsageError(f"profile is a Profile or the path of its JSON file, not {profile!r}")
        changed: dict[str, Any] = {
            "prompt_layers": parse_prompt_layers(self.prompt_layers),
            "profile": profile,
            "schedule": schedule,
            "output": None if self.output is None else Path(self.output),
            "options": {"max_new_tokens": self.task.max_new_tokens} | given(self.options),
        }
        for name, value in changed.items():
            object.__setattr__(self, name, value)
        check_options(self.options, self.batch_size, self.seed)
        if isinstance(self.output, Path):
            check_target(self.output)
            self._refuse_input(self.output)

    def _refuse_input(self, output: Path) -> None:
        """Raise UsageError if the output or its journal is the input file."""
        if isinstance(self.input, (str, Path)) and os.path.exists(self.input):
            real = Path(os.path.realpath(output))
            for path in (real, real.with_name(real.name + ".partial")):
                if path.exists() and path.samefile(self.input):
                    raise UsageError(f"{path} is the input: give another --output")

    def run(
        self,
        *,
        on_start: Callable[[int, int], object] = _ignore,
        on_batch: Callable[[GenerationStats], object] = _ignore,
        say: Callable[[str], object] = _ignore,
    ) -> JobResult:
        """Generate the texts that no earlier run has generated, and write the output.

        Args:
            on_start: called with the number of good items, and how many of them an earlier run has finished.
            on_batch: called with the cost of each batch.
            say: called with messages for the user.

        Raises:
            SkipDecodeError: the input, the model or an option is wrong, or an option's value has no hash by which a
                killed job could resume; the message says what to do.
        """
        config = read_config(self.model, self.revision, self.adapter)
        defaults = read_generation_config(self.model, self.revision)
        check_with_model(self.options, defaults, self.seed)
        self.engine.check(self, config, defaults)
        if isinstance(self.profile, Profile):
            check_profile(self.profile, config, self.dtype, self.device, **self.faster())
        items = self._items()
        prompts = [item.prompt for item in items]
        new_tokens = self.options["max_new_tokens"]
        tokenizer = load_tokenizer(self.model, self.revision)
        if isinstance(self.input, (str, Path)) and (told := texts_for_a_chat_model(tokenizer, prompts)):
            say(told)
        ids = encode_items(items, tokenizer, config, new_tokens)
        lengths = [len(row) for row in ids.values()]
        if lengths and (made_for := max_positions(config)) is not None and max(lengths) + new_tokens > made_for:
            say(f"some rows need more than the model's {made_for} positions: their texts may be poor")
        schedule = None if self.speedup == 1 else self._schedule(config, lengths, num_beams(self.options, defaults))
        if schedule is not None and (folder := adapter_of(self.model, self.adapter)) is not None:
            check_learnt(folder, schedule, config)
        if schedule is not None and (warning := untrained_warning(schedule, config_schedules(config))):
            say(warning)

        completions: dict[int, Completion] = {}
        cost, journal = GenerationStats(num_layers(config)), None
        with ExitStack() as stack:
            if isinstance(self.output, Path) and not is_stream(self.output):
                job = self._fingerprint(config, prompts, schedule)
                journal = stack.enter_context(Journal(self.output, job, replace=self.overwrite))
                completions |= journal.rows
                for earlier in journal.costs:
                    cost += earlier
                if completions:
                    say(f"{len(completions)} rows were done before")
            todo = {index: row for index, row in ids.items() if index not in completions}
            if todo:
                if journal:
                    journal.check_output()
                asked = EngineConfig(**{each.name: getattr(self, each.name) for each in fields(EngineConfig)})
                write_rows = stack.enter_context(
                    self.engine.open(asked, schedule, max(map(len, todo.values())) + new_tokens)
                )
                on_start(len(ids), len(completions))
                for keys, batch, took in write_rows(todo):
                    if journal:
                        journal.add(keys, batch, took)
                    completions.update(zip(keys, batch, strict=True))
                    cost += took
                    on_batch(took)
            figures = {
                "bad_rows": len(items) - len(ids),
                "layers": cost.num_layers,
                "target_speedup": 1.0 if schedule is None else self.speedup or self._target(config, schedule),
                "target_of": self.clock,
            }
            summary = cost.summary() | figures
            result = JobResult(items, completions, summary)
            if journal:
                journal.finish(result.jsonl)
            elif self.output is not None:
                write(self.output, result.jsonl)
            return result

    def _fingerprint(self, config: Any, prompts: Sequence[Prompt], schedule: Schedule | None) -> str:
        """Return a hash of all that the texts depend on."""
        placed = [*map(str, placement(config, self.dtype, self.device))]  # they round differently
        placed += [name if value is True else value for name, value in self.faster().items()]
        placed += [self.engine.name] if self.engine.name else []
        parts = (prompts, schedule.to_dict() if schedule else None, self.options, self.seed, placed, self.batch_size)
        return fingerprint(identity_of(self.model, self.adapter, self.revision), *parts)

    def _target(self, config: Any, schedule: Schedule) -> float:
        """Return what the schedule is called if no speed-up was asked for: the config's fastest, or its own target."""
        return schedule.target

    def _schedule(self, config: Any, lengths: Sequence[int], beams: int) -> Schedule:
        """Return the schedule for prompts of ``lengths`` tokens. Raises UsageError for several beams with a profile."""
        schedule = self.schedule if isinstance(self.schedule, Schedule) else None
        style: dict[str, Any] = {} if self.prompt_layers is None else {"prompt_layers": self.prompt_layers}
        new_tokens = self.options["max_new_tokens"]
        if isinstance(self.profile, Profile) and lengths:
            if beams > 1:
                raise UsageError("a profile knows rows without beams: give a speedup of layers, or num_beams=1")
            works = workloads(lengths, self.batch_size, max(new_tokens, 2))
            return new_schedule(config, self.speedup, Predictor(self.profile, works, self.clock), **style)
        return schedule_for(config, self.speedup, schedule, new_tokens=new_tokens, **style)

    def _items(self) -> list[Item]:
        if isinstance(self.input, (str, Path)):
            items = read_items(str(self.input), self.task, self.format)
        elif given := [each for each in self.input if isinstance(each, Item)]:
            if len(given) < len(self.input):
                raise UsageError("the input holds items and other prompts: give one of the two")
            items = given
        else:
            items = [
                to_item(number, {self.task.prompt_columns[0][0]: prompt}, self.task)
                if isinstance(prompt, str)
                else Item(number, {"prompt": prompt}, prompt)
                for number, prompt in enumerate(to_prompts(self.input), 1)
            ]
        for item in items:
            if self.chat and isinstance(item.prompt, str):
                item.prompt = (Message("user", item.prompt),)
        return items


def encode_items(
    items: Sequence[Item], tokenizer: PreTrainedTokenizerBase, config: Any, new_tokens: int
) -> dict[int, list[int]]:
    """Return prompts' token ids by item index; an item of no or too many tokens gets an ``error`` instead."""
    for item in items:
        if item.error is None and not isinstance(item.prompt, str):
            try:
                render(tokenizer, item.prompt)
            except ModelError as error:  # the chat template refuses this conversation
                if tokenizer.chat_template is None:
                    raise
                item.error = str(error)
    limit, found = position_limit(config), {}
    good = [index for index, item in enumerate(items) if item.error is None]
    for index, ids in zip(good, encode_prompts(tokenizer, [items[index].prompt for index in good]), strict=True):
        if not ids:
            items[index].error = "the prompt has no token"
        elif limit is not None and len(ids) + new_tokens > limit:
            needs = f"{len(ids)} prompt tokens and {new_tokens} new ones"
            items[index].error = f"too long: {needs}, but the model has {limit} positions"
        else:
            found[index] = ids
    return found
