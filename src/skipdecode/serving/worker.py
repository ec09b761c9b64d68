"""What stands before vLLM's own workers where a model has schedules: in :mod:`.worker_cpu` and :mod:`.worker_gpu`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .runner import adapted
from .runner_v1 import SkippingV1
from .runner_v2 import SkippingV2

if TYPE_CHECKING:
    Worker = Any
else:
    Worker = object


class SkipWorker(Worker):
    """A worker whose model runner follows schedules."""

    def init_device(self) -> None:
        """As vLLM's; the runner that it made becomes ours before it has loaded anything."""
        super().init_device()
        adapter = SkippingV2 if self.vllm_config.use_v2_model_runner else SkippingV1
        self.model_runner.__class__ = adapted(type(self.model_runner), adapter)

    def skipdecode_layers(self) -> dict[str, int]:
        """Since the start, tokens times layers: of full depth, that schedules needed, and that were run. And steps, and
        layers that any of a step's tokens ran."""
        return self.model_runner.skip_plan.counted()
