"""vLLM's model runner V1, adapted: gates after loading, and a plan per step."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.config import CUDAGraphMode
from vllm.envs import VLLM_LOG_STATS_INTERVAL
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from ..errors import UnsupportedModel
from .blocks import in_buckets
from .configure import serving_of
from .depths import Step, Tables
from .gate import add_gates
from .head import quantize_head
from .metrics import LayerLog
from .narrow import Narrowing
from .requests import speedup_of

logger = init_logger(f"vllm.{__name__}")  # vLLM's handlers and level hold below its own name


class SkipRunner(CPUModelRunner):
    """vLLM's runner, whose steps follow each request's schedule."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model; put a gate on each decoder layer, and int8 weights into the head where that is asked for."""
        super().load_model(*args, **kwargs)
        serving = serving_of(self.vllm_config)
        assert serving is not None
        self.skip_tables = Tables(serving.schedule)
        self.skip_plan = add_gates(self.model, serving.num_layers)
        if serving.int8_head:
            quantize_head(self.model)
        say = logger.info if self.parallel_config.rank == 0 else logger.debug
        self.skip_log = LayerLog(self.skip_plan, VLLM_LOG_STATS_INTERVAL, say)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """What vLLM's says, in buckets. Raises UnsupportedModel where layers keep more than keys and values."""
        specs = super().get_kv_cache_spec()
        for name, spec in specs.items():
            if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):  # kinds of theirs need more metadata
                raise UnsupportedModel(f"{name} keeps {type(spec).__name__}: only keys and values can skip layers here")
        if self.shared_kv_cache_layers:
            raise UnsupportedModel("layers of this model borrow each other's keys and values: not supported in vLLM")
        serving = serving_of(self.vllm_config)
        assert serving is not None
        return in_buckets(specs, serving, self.vllm_config)

    def _model_forward(self, input_ids: Any = None, positions: Any = None, *args: Any, **kwargs: Any) -> Any:
        context = get_forward_context()
        if not context.attn_metadata:  # a dry run, for memory or compilation: all layers
            return super()._model_forward(input_ids, positions, *args, **kwargs)
        step = self._step()
        if positions.shape[-1] != step.tokens:
            raise RuntimeError(f"the step has {positions.shape[-1]} tokens where {step.tokens} were planned")
        # A compiled graph holds the layers that ran when it was traced: all. It serves full steps, and only those.
        if not step.is_full:
            context.skip_compiled = True
            context.cudagraph_runtime_mode = CUDAGraphMode.NONE
            context.all_moe_layers = None  # experts are counted off in the order of all layers; by name they need not
        self.skip_plan.begin(step, None if step.is_full else Narrowing(self, context))
        try:
            return super()._model_forward(input_ids, positions, *args, **kwargs)
        finally:
            self.skip_plan.end()
            self.skip_log.step()

    def _step(self) -> Step:
        """Which tokens of the batch, as vLLM has prepared it, run which layers."""
        batch = self.input_batch
        count = batch.num_reqs
        tables = []
        for name in batch.req_ids:
            request = self.requests[name]
            if (table := getattr(request, "skip_table", None)) is None:
                table = request.skip_table = self.skip_tables.of(speedup_of(request.sampling_params))
            tables.append(table)
        return self.skip_tables.step(
            tables,
            np.diff(self.query_start_loc.np[: count + 1]).astype(np.int64),
            batch.num_computed_tokens_cpu[:count].astype(np.int64),
            batch.num_prompt_tokens[:count].astype(np.int64),
        )
