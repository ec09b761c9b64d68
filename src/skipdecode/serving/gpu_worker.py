"""vLLM's GPU worker with an adapted runner."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from .worker import SkipWorker


class SkipGPUWorker(SkipWorker, Worker):
    """A GPU's."""
