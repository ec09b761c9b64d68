"""Runs a generation job on a Ray cluster: each actor runs an engine; the starting process keeps the journal."""

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

#: A worker whose engine does its own batching gets up to so many batches of prompts at a time.
BATCHES = 8


@dataclass(frozen=True)
class RayEngine:
    """Runs another engine in ``workers`` actors of a Ray cluster, or of this machine if there is no cluster.

    Completions equal those of a single process: batches hold the same prompts, and each prompt has its own random
    numbers. Every node must be able to read the model: a hub name, or a folder that all nodes have.

    Args:
        engine: the engine that each worker runs.
        workers: number of workers. Each gets an equal share of the CPUs, and one GPU if there are enough.

    Raises:
        MissingExtra: Ray is not installed.
        UsageError: ``workers`` is less than 1.
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
        """Return the name of the wrapped engine, since its completions do not depend on the cluster."""
        return self.engine.name

    def check(self, job: EngineConfig, config: Any, defaults: Any) -> None:
        """Raise what the wrapped engine raises."""
        self.engine.check(job, config, defaults)

    @contextmanager
    def open(self, job: EngineConfig, schedule: Schedule | None, positions: int) -> Iterator[Write]:
        """Connect to the cluster that the environment names (``RAY_ADDRESS``), or start one on this machine."""
        import ray

        mine = not ray.is_initialized()
        if mine:
            os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # errors that end a job are raised anyway
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
        """Yield each group of completions when a worker has finished it."""
        import ray

        job: EngineConfig = opening[1]
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        ray.data.DataContext.get_current().enable_progress_bars = False
        groups = [{"group": pickle.dumps(group)} for group in self._groups(prompts, job.batch_size)]
        # One block per group, so that a worker returns each finished group at once.
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
                # Workers decode at the same time, so a sum of their seconds would mean nothing.
                yield keys, texts, replace(cost, seconds=max(now - before, 1e-9), decode_seconds=0.0)
                before = now

    def _groups(self, prompts: Mapping[int, list[int]], batch_size: int) -> list[dict[int, list[int]]]:
        """Sort prompts by length, longest first, and split them where a single process would start a batch."""
        order = sorted(prompts, key=lambda key: (-len(prompts[key]), key))
        batches = 1 if isinstance(self.engine, Transformers) else BATCHES
        size = batch_size * min(batches, math.ceil(len(order) / self.workers / batch_size))
        return [{key: prompts[key] for key in order[at : at + size]} for at in range(0, len(order), size)]


class Worker:
    """A Ray actor that opens the engine once, and generates completions for one group of prompts after another.

    It returns a SkipDecodeError as a result: Ray would retry a raised one, and bury it in tracebacks.
    """

    def __init__(self, engine: Engine, job: EngineConfig, schedule: Schedule | None, positions: int) -> None:
        self._open = ExitStack()  # never closed: the engine stays open until the process ends
        self._error: SkipDecodeError | None = None
        try:
            self._write = self._open.enter_context(engine.open(job, schedule, positions))
        except SkipDecodeError as error:
            self._error = error

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the batches of one group, or the error, pickled."""
        if self._error is not None:
            return {"batches": pickle.dumps(self._error)}
        try:
            return {"batches": pickle.dumps(list(self._write(pickle.loads(row["group"]))))}
        except SkipDecodeError as error:
            return {"batches": pickle.dumps(error)}
