"""Who writes a job's rows: what a job asks of an engine, and the engine that is transformers' own loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ..core.schedule import Schedule
from ..weights.loading import load
from .generate import batches
from .results import Completion, Cost

if TYPE_CHECKING:
    from .jobs import GenerationJob

#: Rows that are finished: their keys, their texts, and what they took.
Batch = tuple[list[int], list[Completion], Cost]
#: Writes rows, given as token-id prompts by key, and hands them out in groups as they finish.
Write = Callable[[Mapping[int, list[int]]], Iterator[Batch]]


class Engine(Protocol):
    """What writes the rows of a :class:`~skipdecode.generation.jobs.GenerationJob`."""

    @property
    def name(self) -> str:
        """What tells its texts from another engine's, in the journal; empty for transformers' own loop."""

    @property
    def unknown(self) -> frozenset[str]:
        """Figures of :meth:`Cost.summary` that it cannot tell: they are left out."""

    def check(self, job: GenerationJob, config: Any, defaults: Any) -> None:
        """Refuse what it cannot do, before weights are loaded.

        Args:
            job: its options.
            config: the model's.
            defaults: the checkpoint's generation_config.

        Raises:
            SkipDecodeError: naming the option.
        """

    def open(self, job: GenerationJob, schedule: Schedule | None, positions: int) -> AbstractContextManager[Write]:
        """The weights in memory, and what writes with them.

        Args:
            job: its options; rows are given to what is returned.
            schedule: None: the unmodified model.
            positions: the most tokens of a row, prompt and new ones together.
        """


@dataclass(frozen=True)
class Transformers:
    """The default: batches of similar length through ``model.generate``."""

    name: str = ""
    unknown: frozenset[str] = frozenset()

    def check(self, job: GenerationJob, config: Any, defaults: Any) -> None:
        """Nothing: the job's own checks are this engine's."""

    @contextmanager
    def open(self, job: GenerationJob, schedule: Schedule | None, positions: int) -> Iterator[Write]:
        """The model of :func:`~skipdecode.weights.loading.load`."""
        how = {name: getattr(job, name) for name in ("dtype", "device", "revision")} | job.faster()
        model, tokenizer = load(job.model, offload=job.offload, **how)
        yield partial(
            batches,
            model,
            tokenizer,
            decoding=schedule,
            batch_size=job.batch_size,
            seed=job.seed,
            **job.options,
        )
