"""What writes a job's rows: what a job asks of an engine, and the engine that is transformers' own loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from ..core.schedule import Schedule
from ..weights.loading import load
from ..weights.offload import Offload
from ..weights.optimize import optimizations
from .batch_size import BatchSize
from .generate import batches
from .results import Completion, Cost

#: Rows that are finished: their keys, their texts, and what they took.
Batch = tuple[list[int], list[Completion], Cost]
#: Writes rows, given as token-id prompts by key, and hands them out in groups as they finish.
Write = Callable[[Mapping[int, list[int]]], Iterator[Batch]]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is told of a job: the model, where it runs, and how it decodes.

    Attributes:
        model: directory, hub name, or ``demo``.
        dtype, device, revision, offload, quantization, prepack: as :func:`skipdecode.load` takes them.
        clock: what the speed-up is of: ``layers``, ``step`` or ``job``.
        batch_size: rows decoded together; ``auto``: rows of like length, as many as fit into memory.
        seed: of sampling: a row's text depends on it and on the row's number, not on its batch.
        options: as ``model.generate`` names them.
    """

    model: str
    dtype: str = "auto"
    device: str | None = None
    revision: str | None = None
    offload: str | Offload | None = None
    quantization: str | None = None
    prepack: bool = False
    clock: str = "layers"
    batch_size: BatchSize = 32
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def faster(self) -> dict[str, Any]:
        """What makes layers faster, as :func:`skipdecode.load` takes it."""
        return optimizations(self.quantization, self.prepack)


class Engine(Protocol):
    """What writes the rows of a :class:`~skipdecode.generation.jobs.GenerationJob`."""

    @property
    def name(self) -> str:
        """What tells its texts from another engine's, in the journal; empty for transformers' own loop."""

    @property
    def unknown(self) -> frozenset[str]:
        """Figures of :meth:`Cost.summary` that it cannot tell: they are left out."""

    def check(self, job: EngineConfig, config: Any, defaults: Any) -> None:
        """Refuse what it cannot do, before weights are loaded.

        Args:
            job: what it is asked for.
            config: the model's.
            defaults: the checkpoint's generation_config.

        Raises:
            SkipDecodeError: naming the option.
        """

    def open(self, job: EngineConfig, schedule: Schedule | None, positions: int) -> AbstractContextManager[Write]:
        """Hold the weights in memory, and return what writes with them.

        Args:
            job: what it is asked for.
            schedule: None: the unmodified model.
            positions: the most tokens of a row, prompt and new ones together.
        """


@dataclass(frozen=True)
class Transformers:
    """The default: batches of similar length through ``model.generate``."""

    name: str = ""
    unknown: frozenset[str] = frozenset()

    def check(self, job: EngineConfig, config: Any, defaults: Any) -> None:
        """Nothing: the job's own checks are this engine's."""

    @contextmanager
    def open(self, job: EngineConfig, schedule: Schedule | None, positions: int) -> Iterator[Write]:
        """The model of :func:`~skipdecode.weights.loading.load`."""
        where: dict[str, Any] = {"dtype": job.dtype, "device": job.device, "revision": job.revision}
        model, tokenizer = load(job.model, offload=job.offload, **where, **job.faster())
        yield partial(
            batches, model, tokenizer, decoding=schedule, batch_size=job.batch_size, seed=job.seed, **job.options
        )
