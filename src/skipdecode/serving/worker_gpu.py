"""vLLM's GPU worker, following schedules. Written by vLLM's source, never run: refused unless told to try."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from .worker import SkipWorker


class SkipGPUWorker(SkipWorker, Worker):
    """vLLM's GPU worker with a runner of ours."""
