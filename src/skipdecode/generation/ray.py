"""Generation jobs on a Ray cluster: each worker runs an engine, and the starting process keeps the progress."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import Any

from ..errors import MissingExtra, SkipDecodeError, UsageError
from .stats import GenerateBatch, GenerationOutput


def generate_on_ray(
    start: Callable[[], AbstractContextManager[GenerateBatch]],
    batches: Mapping[int, tuple[Sequence[Sequence[int]], int]],
    workers: int,
    on_gpu: bool,
) -> Iterator[tuple[int, GenerationOutput]]:
    """Batches as the workers finish them, on the cluster ``RAY_ADDRESS`` or on this machine.

    Texts equal those of one process: the batches are the same. Every node must be able to read the model.

    Args:
        start: loads the model on a worker.
        batches: token-id prompts and seed of each batch, by its number.
        workers: number of workers, which share the CPUs.
        on_gpu: whether each gets a GPU.

    Raises:
        MissingExtra: Ray is not installed.
        UsageError: the cluster has too few CPUs or GPUs.
    """
    try:
        import ray
        from ray.exceptions import RayTaskError
        from ray.util import ActorPool
    except ImportError:
        raise MissingExtra("workers on a cluster need Ray: pip install '.[ray]' in a clone") from None
    is_own = not ray.is_initialized()
    if is_own:
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # errors that end a job are raised anyway
        ray.init(log_to_driver=False, logging_level="ERROR")
    actors: list[Any] = []
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cpus = cpus_per_worker(nodes, workers, on_gpu)
        if not cpus:
            kind = "GPUs" if on_gpu else "CPUs"
            raise UsageError(f"{workers} workers on {kind} find no room on the cluster: {nodes}")
        # Workers that die, as with their node, are started again, and their batches are generated again.
        each_has = {"num_cpus": cpus, "num_gpus": int(on_gpu)}
        actor: Any = ray.remote(max_restarts=-1, max_task_retries=-1, **each_has)(Worker)
        actors += [actor.remote(start) for _ in range(workers)]
        before = time.perf_counter()
        finished = ActorPool(actors).map_unordered(lambda each, item: each.run.remote(*item), batches.items())
        for index, output in finished:
            now = time.perf_counter()
            output.stats = replace(output.stats, seconds=now - before, decode_seconds=0.0)
            before = now
            yield index, output
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, SkipDecodeError) else error from None
    finally:
        for each in actors:
            ray.kill(each)
        if is_own:
            ray.shutdown()


def cpus_per_worker(nodes: Sequence[Mapping[str, float]], workers: int, on_gpu: bool = False) -> int:
    """Most CPUs that each worker can have on one node, beside a GPU of its own if any; 0: some would find no room."""
    most = max((int(node.get("CPU", 0)) for node in nodes), default=0)
    for cpus in range(most, 0, -1):
        rooms = [min(node.get("CPU", 0) // cpus, node.get("GPU", 0) if on_gpu else workers) for node in nodes]
        if sum(map(int, rooms)) >= workers:
            return cpus
    return 0


class Worker:
    """A Ray actor, which loads the model once, and generates the texts of one batch after another."""

    def __init__(self, start: Callable[[], AbstractContextManager[GenerateBatch]]) -> None:
        self._engine = start()  # never closed: it ends with the process

    @cached_property
    def _generate(self) -> GenerateBatch:
        return self._engine.__enter__()

    def run(self, index: int, batch: tuple[Sequence[Sequence[int]], int]) -> tuple[int, GenerationOutput]:
        """The batch's number and its output."""
        return index, self._generate(*batch)
