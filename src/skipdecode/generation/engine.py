"""Engines generate the texts of a job: their protocol, and the default engine, which calls ``model.generate``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ..loading.load import load
from ..loading.offload import Offload
from ..loading.optimize import optimizations
from ..schedule import Schedule
from .generate import batches
from .stats import Completion, GenerationStats

#: A finished batch: the keys of its prompts, their completions, and the cost.
Batch = tuple[list[int], list[Completion], GenerationStats]
#: Takes token-id prompts by key, generates their texts, and yields batches as they finish.
Write = Callable[[Mapping[int, list[int]]], Iterator[Batch]]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of a job that an engine needs: the model, where it runs, and how it decodes.

    Attributes:
        model: directory, hub name, or ``demo``.
        dtype, device, revision, offload, quantization, prepack: as :func:`skipdecode.load` takes them.
        clock: what the speed-up divides: ``layers`` per step, seconds of a ``step``, or seconds of the ``job``.
        batch_size: prompts decoded together.
        seed: for sampling; a text depends on the seed and the prompt's number, not on its batch.
        options: options of ``model.generate``.
        adapter: folder of the adapter to attach, if ``model`` is not that folder.
    """

    model: str
    dtype: str = "auto"
    device: str | None = None
    revision: str | None = None
    offload: str | Offload | None = None
    quantization: str | None = None
    prepack: bool = False
    clock: str = "layers"
    batch_size: int = 32
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    adapter: str | Path | None = None

    def faster(self) -> dict[str, Any]:
        """Return those of the arguments ``quantization`` and ``prepack`` of :func:`skipdecode.load` that are set."""
        return optimizations(self.quantization, self.prepack)


class Engine(Protocol):
    """The interface of engines, which generate the texts of a :class:`~skipdecode.generation.job.GenerationJob`."""

    @property
    def name(self) -> str:
        """Return the engine's name, which keeps other engines from resuming its jobs; empty for the default engine."""

    def check(self, job: EngineConfig, config: Any, defaults: Any) -> None:
        """Check, before weights are loaded, that the engine can run the job.

        Args:
            config: the model's config.
            defaults: the checkpoint's generation_config.

        Raises:
            SkipDecodeError: the engine does not support an option, which the message names.
        """

    def open(self, job: EngineConfig, schedule: Schedule | None, positions: int) -> AbstractContextManager[Write]:
        """Return a context manager that loads the weights, and yields the function that generates texts with them.

        Args:
            schedule: None runs the unmodified model.
            positions: the largest number of tokens of a prompt and its text together.
        """


@dataclass(frozen=True)
class Transformers:
    """The default engine: it batches prompts of similar length and calls ``model.generate``."""

    name: str = ""

    def check(self, job: EngineConfig, config: Any, defaults: Any) -> None:
        """Do nothing: the job's own checks suffice."""

    @contextmanager
    def open(self, job: EngineConfig, schedule: Schedule | None, positions: int) -> Iterator[Write]:
        """Load the model, and yield a function that generates texts for token-id prompts, batch by batch.

        Arguments are those of :meth:`Engine.open`. Nothing is released on exit.
        """
        where: dict[str, Any] = {"dtype": job.dtype, "device": job.device, "revision": job.revision}
        model, tokenizer = load(job.model, offload=job.offload, adapter=job.adapter, **where, **job.faster())
        given: dict[str, Any] = {"batch_size": job.batch_size, "seed": job.seed}
        yield partial(batches, model, tokenizer, decoding=schedule, **given, **job.options)
