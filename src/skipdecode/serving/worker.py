"""The worker that vLLM starts in place of its own where a model has schedules."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from .runner import SkipRunner


class SkipCPUWorker(CPUWorker):
    """vLLM's CPU worker with a :class:`SkipRunner`."""

    def init_device(self) -> None:
        """As vLLM's; the runner that it made becomes ours before it has loaded anything."""
        super().init_device()
        self.model_runner.__class__ = SkipRunner

    def skipdecode_layers(self) -> dict[str, Any]:
        """Tokens times layers since the start: of full depth, that schedules needed, and that were run."""
        plan = self.model_runner.skip_plan
        return {"full": plan.full_tokens, "needed": plan.needed_tokens, "run": plan.run_tokens}
