"""vLLM's workers with a model runner that follows schedules. That of GPUs was never run, and is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker as GPUWorker

from .configure import refuse, serving_of
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
        """As vLLM's; the runner that it made becomes ours before it has loaded anything.

        Raises:
            UnsupportedModel: for what vLLM has put into the config since it was checked there.
        """
        serving = serving_of(self.vllm_config)
        assert serving is not None
        refuse(self.vllm_config, serving)
        super().init_device()
        adapter = SkippingV2 if self.vllm_config.use_v2_model_runner else SkippingV1
        self.model_runner.__class__ = adapted(type(self.model_runner), adapter)

    def skipdecode_layers(self) -> dict[str, int]:
        """Since the start, tokens times layers: of full depth, that schedules needed, and that were run. And steps, and
        layers that any of a step's tokens ran."""
        return self.model_runner.skip_plan.counted()


class SkipCPUWorker(SkipWorker, CPUWorker):
    """vLLM's CPU worker with a runner of ours."""


class SkipGPUWorker(SkipWorker, GPUWorker):
    """vLLM's GPU worker with a runner of ours."""
