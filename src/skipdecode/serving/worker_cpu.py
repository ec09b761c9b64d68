"""vLLM's CPU worker, following schedules."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from .worker import SkipWorker


class SkipCPUWorker(SkipWorker, CPUWorker):
    """vLLM's CPU worker with a runner of ours."""
