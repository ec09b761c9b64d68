"""The worker that vLLM starts in place of its own where a model has schedules."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from .runner import SkipRunner


class SkipCPUWorker(CPUWorker):
    """vLLM's CPU worker with a :class:`SkipRunner`."""

    def init_device(self) -> None:
        """As vLLM's; the runner that it made becomes ours before it has loaded anything."""
        super().init_device()
        self.model_runner.__class__ = SkipRunner

    def skipdecode_layers(self) -> dict[str, int]:
        """Since the start, tokens times layers: of full depth, that schedules needed, and that were run. And steps, and
        layers that any of a step's tokens ran."""
        return self.model_runner.skip_plan.counted()
