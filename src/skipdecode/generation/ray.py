"""Runs a generation job on a Ray cluster: each actor runs an engine; the starting process keeps the journal."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any

from ..errors import MissingExtra, SkipDecodeError, UsageError
from ..loading.device import placement
from ..loading.load import read_config
from ..schedule import Schedule
from .engine import Batch, Engine, EngineConfig, Transformers, Write

#: A worker whose engine does its own batching gets up to so many batches of prompts at a time.
BATCHES = 8


def cpus_each(nodes: Sequence[Mapping[str, float]], workers: int, on_gpu: bool = False) -> int:
    """Return the most CPUs that each worker can have, each on one node; 0: some would find no place.

    Args:
        nodes: the resources of each, by Ray's names.
        workers: how many there are to be.
        on_gpu: each needs a GPU of its node too.
    """

    def places(node: Mapping[str, float], cpus: int) -> int:
        room = int(node.get("CPU", 0)) // cpus
        return min(room, int(node.get("GPU", 0))) if on_gpu else room

    most = max((int(node.get("CPU", 0)) for node in nodes), default=0)
    shares = (cpus for cpus in range(most, 0, -1) if sum(places(node, cpus) for node in nodes) >= workers)
    return next(shares, 0)


@dataclass(frozen=True)
class RayEngine:
    """Runs another engine in ``workers`` actors of a Ray cluster, or of this machine if there is no cluster.

    Completions equal those of a single process: batches hold the same prompts, and each prompt has its own random
    numbers. Every node must be able to read the model: a hub name, or a folder that all nodes have.

    Args:
        engine: the engine that each worker runs.
        workers: number of workers, each with an equal share of the CPUs. They compute on the kind of device, and in the
            dtype, that the starting process would: where that is a GPU, each gets one.

    Raises:
        MissingExtra: Ray is not installed.
        UsageError: ``workers`` is less than 1.
    """

    engine: Engine = field(default_factory=Transformers)
    workers: int = 2

    def __post_init__(self) -> None:
        if find_spec("ray") is None:
            raise MissingExtra("workers on a cluster need Ray: pip install 'skipdecode[ray]'")
        if self.workers < 1:
            raise UsageError(f"workers is a number, 1 or more, not {self.workers}")

    @property
    def name(self) -> str:
        """Return the name of the wrapped engine, since its completions do not depend on the cluster."""
        return self.engine.name

    def check(self, job: EngineConfig, config: Any, defaults: Any) -> None:
        """Check the job as the wrapped engine does, and raise what it raises."""
        self.engine.check(job, config, defaults)

    @contextmanager
    def open(self, job: EngineConfig, schedule: Schedule | None, positions: int) -> Iterator[Write]:
        """Start the workers, on the cluster ``RAY_ADDRESS`` or here, and yield a function that generates texts.

        ``schedule`` None runs the unmodified model; ``positions`` is the largest number of tokens of prompt and text.
        The workers, and a cluster started here, end on exit.
        """
        import ray

        dtype, device = placement(read_config(job.model, job.revision, job.adapter), job.dtype, job.device)
        job, on_gpu = replace(job, dtype=str(dtype).removeprefix("torch."), device=device), device != "cpu"
        mine = not ray.is_initialized()
        if mine:
            os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # errors that end a job are raised anyway
            ray.init(log_to_driver=False, logging_level="ERROR")
        workers = []
        try:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            cpus = cpus_each(nodes, self.workers, on_gpu)
            if not cpus:
                need, have = "a CPU and a GPU" if on_gpu else "a CPU", ", ".join(map(str, nodes)) or "no node"
                raise UsageError(f"{self.workers} workers need {need} each, and the cluster has {have}")
            resources = {"num_cpus": cpus, "num_gpus": int(on_gpu)}
            # Workers that die, as with their node, are started again, and groups that they had are generated again.
            actor: Any = ray.remote(max_restarts=-1, max_task_retries=-1, **resources)(Worker)
            workers += [actor.remote(self.engine, job, schedule, positions) for _ in range(self.workers)]
            yield partial(self._write, workers, int(job.batch_size))
        finally:
            for worker in workers:
                ray.kill(worker)
            if mine:
                ray.shutdown()

    def _write(self, workers: list[Any], batch_size: int, prompts: Mapping[int, list[int]]) -> Iterator[Batch]:
        """Generate texts for token-id prompts, and yield their batches as workers finish them."""
        from ray.exceptions import RayTaskError
        from ray.util import ActorPool

        before = time.perf_counter()
        try:
            for batches in ActorPool(workers).map_unordered(
                lambda worker, group: worker.write.remote(group), self._groups(prompts, batch_size)
            ):
                for keys, texts, cost in batches:
                    now = time.perf_counter()
                    yield keys, texts, replace(cost, seconds=max(now - before, 1e-9), decode_seconds=0.0)
                    before = now
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, SkipDecodeError) else error from None

    def _groups(self, prompts: Mapping[int, list[int]], batch_size: int) -> list[dict[int, list[int]]]:
        """Sort prompts by length, longest first, and split them where a single process would start a batch."""
        order = sorted(prompts, key=lambda key: (-len(prompts[key]), key))
        batches = 1 if isinstance(self.engine, Transformers) else BATCHES
        size = batch_size * min(batches, math.ceil(len(order) / self.workers / batch_size))
        return [{key: prompts[key] for key in order[at : at + size]} for at in range(0, len(order), size)]


class Worker:
    """A Ray actor that opens the engine once, and generates completions for one group of prompts after another."""

    def __init__(self, engine: Engine, *opening: Any) -> None:
        self._context = engine.open(*opening)  # never closed: the engine stays open until the process ends

    @cached_property
    def _write(self) -> Write:
        return self._context.__enter__()

    def write(self, prompts: dict[int, list[int]]) -> list[Batch]:
        """Return the batches of one group of prompts."""
        return list(self._write(prompts))
