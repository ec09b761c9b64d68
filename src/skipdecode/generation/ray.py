"""Generation jobs on a Ray cluster: each worker runs an engine, and the starting process keeps the progress."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ..errors import MissingExtra, SkipDecodeError, UsageError
from ..loading.device import placement
from ..schedule import Schedule
from .job import GenerateBatch, GenerationJob, start_engine
from .stats import GenerationOutput


def generate_on_ray(
    job: GenerationJob,
    batches: Mapping[int, Sequence[Sequence[int]]],
    schedule: Schedule,
    options: Mapping[str, Any],
    positions: int,
) -> Iterator[tuple[int, GenerationOutput]]:
    """Batches as ``job.workers`` actors finish them, on the cluster ``RAY_ADDRESS`` or on this machine.

    Texts equal those of one process: the batches are the same. Every node must be able to read the model. Workers
    compute on the kind of device that this process would, one GPU each, and share the CPUs.

    Args:
        job: the job.
        batches: token-id prompts of each batch, by its number.
        schedule: which layers run.
        options: of ``model.generate``.
        positions: most tokens of a prompt and its text.

    Raises:
        MissingExtra: Ray is not installed.
        UsageError: the cluster has too few CPUs or GPUs.
        SkipDecodeError: what a worker raised.
    """
    try:
        import ray
        from ray.exceptions import RayTaskError
        from ray.util import ActorPool
    except ImportError:
        raise MissingExtra("workers on a cluster need Ray: pip install 'skipdecode[ray]'") from None
    dtype, device = placement(job.checkpoint.config, job.load.get("dtype", "auto"), job.load.get("device"))
    job = replace(job, load={**job.load, "dtype": str(dtype).removeprefix("torch."), "device": device})
    is_own = not ray.is_initialized()
    if is_own:
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # errors that end a job are raised anyway
        ray.init(log_to_driver=False, logging_level="ERROR")
    workers: list[Any] = []
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cpus = cpus_per_worker(nodes, job.workers, on_gpu=device != "cpu")
        if not cpus:
            raise UsageError(f"{job.workers} workers on {device} find no room on the cluster: {nodes}")
        # Workers that die, as with their node, are started again, and their batches are generated again.
        options_of_ray = {"num_cpus": cpus, "num_gpus": int(device != "cpu")}
        actor: Any = ray.remote(max_restarts=-1, max_task_retries=-1, **options_of_ray)(Worker)
        workers += [actor.remote(job, schedule, options, positions) for _ in range(job.workers)]
        before = time.perf_counter()
        finished = ActorPool(workers).map_unordered(lambda worker, item: worker.run.remote(*item), batches.items())
        for index, output in finished:
            now = time.perf_counter()
            output.stats = replace(output.stats, seconds=now - before, decode_seconds=0.0)
            before = now
            yield index, output
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, SkipDecodeError) else error from None
    finally:
        for worker in workers:
            ray.kill(worker)
        if is_own:
            ray.shutdown()


def cpus_per_worker(nodes: Sequence[Mapping[str, float]], workers: int, on_gpu: bool = False) -> int:
    """Most CPUs that each worker can have on one node; 0 if some would find no room.

    Args:
        nodes: resources of each node, by Ray's names.
        workers: number of workers.
        on_gpu: whether each needs a GPU of its node too.
    """

    def room(node: Mapping[str, float], cpus: int) -> int:
        fits = int(node.get("CPU", 0)) // cpus
        return min(fits, int(node.get("GPU", 0))) if on_gpu else fits

    most = max((int(node.get("CPU", 0)) for node in nodes), default=0)
    return next((cpus for cpus in range(most, 0, -1) if sum(room(node, cpus) for node in nodes) >= workers), 0)


class Worker:
    """A Ray actor, which loads the model once, and generates the texts of one batch after another."""

    def __init__(self, job: GenerationJob, *start: Any) -> None:
        self.job = job
        self._engine = start_engine(job, *start)  # never closed: it ends with the process

    @cached_property
    def _generate(self) -> GenerateBatch:
        return self._engine.__enter__()

    def run(self, index: int, batch: Sequence[Sequence[int]]) -> tuple[int, GenerationOutput]:
        """The batch's number and its output."""
        return index, self._generate(batch, self.job.seed + index)
