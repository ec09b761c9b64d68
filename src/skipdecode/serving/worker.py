"""What our workers add to vLLM's: a model runner that follows schedules."""

from __future__ import annotations

from typing import Any

from .configure import refuse, serving_of
from .runner_v1 import SkippingV1
from .runner_v2 import SkippingV2

Worker: Any = object


class SkipWorker(Worker):
    """A worker whose model runner follows schedules."""

    def init_device(self) -> None:
        """Initialize the device, and adapt vLLM's model runner before it loads the model.

        Raises UnsupportedModel if vLLM has set an unsupported option since the config was checked.
        """
        serving = serving_of(self.vllm_config)
        assert serving is not None
        refuse(self.vllm_config, serving)
        super().init_device()
        adapter, runner = SkippingV2 if self.vllm_config.use_v2_model_runner else SkippingV1, self.model_runner
        runner.__class__ = type(f"Skipping{type(runner).__name__}", (adapter, type(runner)), {})
        runner.skip_serving = serving

    def compile_or_warm_up_model(self) -> Any:
        """Compile the layers for steps that skip, and then do what vLLM does."""
        self.model_runner.compile_layers()
        return super().compile_or_warm_up_model()

    def skipdecode_layers(self) -> dict[str, int]:
        """Return tokens times layers since the start: those at full depth, those that schedules need, those run."""
        plan = self.model_runner.skip_plan
        return {"full": plan.full_tokens, "needed": plan.needed_tokens, "run": plan.run_tokens}
