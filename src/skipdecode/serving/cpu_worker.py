"""vLLM's CPU worker with an adapted runner. vLLM's own takes events and streams out of torch when it is imported."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from .worker import SkipWorker


class SkipCPUWorker(SkipWorker, CPUWorker):
    """A CPU's."""
