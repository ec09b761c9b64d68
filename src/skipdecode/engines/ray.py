"""A generation job over a Ray cluster: an engine in each of several actors, the journal with who started the job."""

from __future__ import annotations

import logging
import math
import os
import pickle
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from ..core.schedule import Schedule
from ..errors import MissingExtra, SkipDecodeError, UsageError
from ..generation.engine import Batch, Engine, EngineConfig, Transformers, Write

#: A worker whose engine fills its own batches gets so many batches of rows at a time.
BATCHES = 8


@dataclass(frozen=True)
class RayEngine:
    """Another engine in ``workers`` actors of a Ray cluster; without a cluster, of this machine.

    Every row's text is what one process writes: rows that the engine decodes together are the same, and random
    numbers are a row's own. The model must be in reach of every node: a hub name, or a folder that all have.

    Args:
        engine: what each worker runs.
        workers: how many; the cluster's CPUs, and GPUs where there is one for each, are shared out among them.

    Raises:
        MissingExtra: Ray is not installed.
        UsageError: no worker.
    """

    engine: Engine = field(default_factory=Transformers)
    workers: int = 2

    def __post_init__(self) -> None:
        if find_spec("ray") is None or find_spec("pyarrow") is None:
            raise MissingExtra("workers on a cluster need Ray: pip install 'skipdecode[ray]'")
        if self.workers < 1:
            raise UsageError(f"workers is a number, 1 or more, not {self.workers}")

    @property
    def name(self) -> str:
        """The engine's: texts do not depend on where they are written."""
        return self.engine.name

    @property
    def unknown(self) -> frozenset[str]:
        """Workers decode at the same time: their seconds do not add up."""
        return self.engine.unknown | {"decode_seconds"}

    def check(self, job: EngineConfig, config: Any, defaults: Any) -> None:
        """Raises what the engine raises, and UsageError for what depends on the machine that a row is written on."""
        self.engine.check(job, config, defaults)
        if job.batch_size == "auto":
            raise UsageError("batch_size auto depends on a machine's memory: with workers give a number")

    @contextmanager
    def open(self, job: EngineConfig, schedule: Schedule | None, positions: int) -> Iterator[Write]:
        """A connection to the cluster that the environment names (``RAY_ADDRESS``), or a cluster of this machine."""
        import ray

        mine = not ray.is_initialized()
        if mine:
            os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # what ends a job is raised as well
            ray.init(log_to_driver=False, logging_level="ERROR")
        try:
            there = ray.cluster_resources()
            cpus = int(there.get("CPU", 0))
            if self.workers > cpus:
                raise UsageError(f"{self.workers} workers need a CPU each, and the cluster has {cpus}")
            resources = {"num_cpus": cpus // self.workers, "num_gpus": int(there.get("GPU", 0) >= self.workers)}
            yield partial(self._write, (self.engine, job, schedule, positions), resources)
        finally:
            if mine:
                ray.shutdown()

    def _write(
        self, opening: tuple[Any, ...], resources: Mapping[str, int], prompts: Mapping[int, list[int]]
    ) -> Iterator[Batch]:
        """Groups of rows, each written by one worker, as they are finished."""
        import ray

        job: EngineConfig = opening[1]
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        ray.data.DataContext.get_current().enable_progress_bars = False
        groups = [{"group": pickle.dumps(group)} for group in self._groups(prompts, int(job.batch_size))]
        # One block each: what a worker has written leaves it at once.
        data = ray.data.from_items(groups, override_num_blocks=len(groups))
        pool = ray.data.ActorPoolStrategy(size=min(self.workers, len(groups)))
        done = data.map(Worker, fn_constructor_args=opening, compute=pool, **resources)
        before = time.perf_counter()
        for row in done.iter_rows():
            written = pickle.loads(row["batches"])
            if isinstance(written, SkipDecodeError):
                raise written
            for keys, texts, cost in written:
                now = time.perf_counter()
                yield keys, texts, replace(cost, seconds=max(now - before, 1e-9), decode_seconds=0.0)
                before = now

    def _groups(self, prompts: Mapping[int, list[int]], batch_size: int) -> list[dict[int, list[int]]]:
        """Rows by length, the longest first; cut where one process would begin a batch."""
        order = sorted(prompts, key=lambda key: (-len(prompts[key]), key))
        batches = 1 if isinstance(self.engine, Transformers) else BATCHES
        size = batch_size * min(batches, math.ceil(len(order) / self.workers / batch_size))
        return [{key: prompts[key] for key in order[at : at + size]} for at in range(0, len(order), size)]


class Worker:
    """An actor: it opens the engine once, and writes group after group.

    What the user can mend is a result like any other: Ray would try again, and bury it in tracebacks.
    """

    def __init__(self, engine: Engine, job: EngineConfig, schedule: Schedule | None, positions: int) -> None:
        self._open = ExitStack()  # until the process ends
        self._error: SkipDecodeError | None = None
        try:
            self._write = self._open.enter_context(engine.open(job, schedule, positions))
        except SkipDecodeError as error:
            self._error = error

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """The batches of one group, or the error."""
        if self._error is not None:
            return {"batches": pickle.dumps(self._error)}
        try:
            return {"batches": pickle.dumps(list(self._write(pickle.loads(row["group"]))))}
        except SkipDecodeError as error:
            return {"batches": pickle.dumps(error)}
