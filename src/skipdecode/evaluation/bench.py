"""What every arm is measured on: rows, settings and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import __version__
from ..core.schedule import Schedule
from ..data.metrics import DEFAULT, Metric
from ..data.tasks import Example, Task, subsample
from ..data.tokenization import encode_prompts
from ..generation.batch import Decoding
from ..generation.generate import generate_ids
from ..generation.results import Generated
from ..planning.clock import Clock
from ..planning.profile import Profile
from ..planning.resolve import new_schedule
from ..provenance import fingerprint
from ..weights.device import machine
from ..weights.loading import load_tokenizer, read_config
from .arms import Arm


@dataclass
class Bench:
    """What every arm is measured on.

    Attributes:
        task: how rows are prompted and scored.
        examples: these are scored.
        held_out: lengths, CALM's threshold and losses come from these.
        batch_size: rows decoded together.
        max_new_tokens: 0: the task's.
        timing_rows: how many of the examples are timed, evenly drawn from them.
        repeats: rounds timed, the full model and the arm in turn.
        samples: corpora resampled for the intervals.
        metrics: each becomes a score with its difference from the full model's.
        dtype, device: as :func:`skipdecode.load` takes them.
        faster: what makes layers faster, as :func:`skipdecode.load` takes it: of every arm's models.
        clock: what the arms' speed-ups are of.
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
    faster: Mapping[str, Any] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    options: dict[str, Any] = field(default_factory=lambda: {"do_sample": False})

    def __post_init__(self) -> None:
        self.max_new_tokens = self.max_new_tokens or self.task.max_new_tokens

    def generate(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        examples: Sequence[Example],
        decoding: Decoding,
        **options: Any,
    ) -> Generated:
        """Texts for these examples' prompts; ``options`` go before the bench's own."""
        ids = encode_prompts(tokenizer, [example.prompt for example in examples])
        options = {"max_new_tokens": self.max_new_tokens} | self.options | options
        return generate_ids(model, tokenizer, ids, decoding, self.batch_size, **options)

    def fingerprint(self) -> str:
        """What makes two measurements the same: rows, settings, machine and versions."""
        texts = [asdict(example) for example in (*self.examples, *self.held_out)]
        numbers = (self.batch_size, self.max_new_tokens, self.timing_rows, self.repeats, self.samples)
        names = [repr(vars(metric) | {"name": metric.name}) for metric in self.metrics]
        parts = [texts, numbers, names, self.options, self.dtype, self.device, machine(self.device), __version__]
        clock = [self.clock.name, self.clock.profile.to_json()] if isinstance(self.clock.profile, Profile) else []
        return fingerprint(*parts, *([dict(self.faster)] if self.faster else []), *clock)

    def planned(self, arm: Arm, steps: int) -> Schedule | None:
        """What gives the arm its speed-up of the clock in the timed runs, at ``steps`` steps; None where layers count.

        Raises ScheduleError, UsageError: it cannot be had, or the profile is of other runs.
        """
        if self.clock.name == "layers" or not arm.method.skips or arm.schedule is not None:
            return None
        config = read_config(arm.model)
        self.clock.check(config, self.dtype, self.device, **self.faster)
        prompts = [example.prompt for example in subsample(self.examples, self.timing_rows)]
        lengths = [len(ids) for ids in encode_prompts(load_tokenizer(arm.model), prompts)]
        predictor = self.clock.predictor(lengths, self.batch_size, steps + 1)
        assert predictor is not None  # it is for layers alone
        return new_schedule(config, arm.speedup, predictor, method=arm.method)
