"""Adapts vLLM's model runner V2, which GPUs have: plans a step where the runner gathers its requests.

The runner then calls the model, whose ``forward`` follows the plan, or replays a CUDA graph of it. A graph replays the
layers of its capture. So one is captured for each kind of step in which all tokens run the same layers, and each batch
size, by vLLM's own manager: of LoRA adapters, which schedules refuse, it keeps a graph for each number that may be
active, and that number says here of which kind the graph is. Other steps run without a graph. On a CPU the tests call
the model again where a graph would be replayed.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from ..errors import UnsupportedModel
from .attention import Prepared
from .patch import patch
from .requests import speedup_of
from .runner import Skipping
from .steps import Step, Table


class SkippingV2(Skipping):
    """The adapter for runners with interface V2."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model with gates, and hook the model state to learn of requests and steps."""
        super().load_model(*args, **kwargs)
        self.skip_requests: dict[str, Table] = {}
        self.skip_step: Step | None = None  # the plan of the step that the model runs next; None: a dry run
        self.skip_batch: tuple[Any, Any] = (None, None)  # its batch and block tables
        self.skip_captured: Step | None = None  # the plan of the graph that is captured
        self.lora_capture_cases = list(range(self.skip_tables.kinds))
        state = self.model_state
        patch(state, "add_request", self._add_table)
        patch(state, "remove_request", self._remove_table)
        patch(state, "preprocess_state", self._keep)
        patch(self.model, "forward", self._planned_forward)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Initialize the cache, and hook the graphs' manager, which is made with it.

        Raises UnsupportedModel if the model's attention takes no CUDA graph of a whole step.
        """
        super().initialize_kv_cache(*args, **kwargs)
        if self.cudagraph_manager.cudagraph_mode.has_piecewise_cudagraphs():
            raise UnsupportedModel("this model's attention takes no CUDA graph of a whole step: --enforce-eager")
        self.hook_graphs()

    def hook_graphs(self) -> None:
        """Let the graphs' manager keep a graph for each kind of step, and take the one of the next step."""
        patch(self.cudagraph_manager, "capture", self._capture)
        patch(self.cudagraph_manager, "dispatch", self._dispatch)
        patch(self.cudagraph_manager, "run_fullgraph", self._replay)

    def dry_run(self, tokens: int) -> None:
        """Run the model on as many tokens of no text."""
        self._dummy_run(tokens, skip_attn=True, is_profile=True)

    def gather_batch_req_state(self, *args: Any, **kwargs: Any) -> Any:
        """Gather the requests of a step, and plan it."""
        batch, uniform = super().gather_batch_req_state(*args, **kwargs)
        self.skip_step = None
        if batch is not None:
            tables = [self.skip_requests[name] for name in batch.req_ids]
            computed, prompts = self.req_states.num_computed_tokens_np, self.req_states.prompt_len.np
            places = batch.idx_mapping_np
            self.skip_step = self.skip_tables.step(
                tables, batch.num_scheduled_tokens, computed[places], prompts[places]
            )
        return batch, uniform

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step. Raises RuntimeError if neither the model's ``forward`` nor a graph followed its plan."""
        output = super().execute_model(*args, **kwargs)
        if self.skip_step is not None:
            raise RuntimeError("the step ran neither the model nor a graph of its layers")
        return output

    def _add_table(self, original: Any, index: int, request: Any) -> None:
        original(index, request)
        self.skip_requests[request.req_id] = self.skip_tables.of(speedup_of(request.sampling_params))

    def _remove_table(self, original: Any, name: str) -> None:
        original(name)
        self.skip_requests.pop(name, None)

    def _keep(self, original: Any, batch: Any, block_tables: Any, *args: Any) -> Any:
        self.skip_batch = batch, block_tables
        return original(batch, block_tables, *args)

    def _planned_forward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        step = self.skip_captured or self._taken()
        if step is None:
            return original(*args, **kwargs)
        with self.following(step, kwargs["positions"], self._prepared):
            return original(*args, **kwargs)

    def _taken(self) -> Step | None:
        step, self.skip_step = self.skip_step, None
        return step

    def _capture(self, original: Any, *args: Any, **kwargs: Any) -> None:
        def of_kind(kind: int, requests: int, tokens: int) -> None:
            self.skip_captured = self.skip_tables.alike(kind, tokens)

        try:
            original(*args, **kwargs | {"lora_capture_hook": of_kind})
        finally:
            self.skip_captured = None
            self.skip_plan.forget()

    def _dispatch(
        self, original: Any, num_reqs: int, num_tokens: int, uniform: int | None, num_active_loras: int, **kwargs: Any
    ) -> Any:
        kind = self.skip_step.kind if self.skip_step is not None else 0
        if kind is None:
            return BatchExecutionDescriptor(cg_mode=CUDAGraphMode.NONE, num_tokens=num_tokens, num_reqs=num_reqs)
        return original(num_reqs, num_tokens, uniform, num_active_loras=kind, **kwargs)

    def _replay(self, original: Any, graph: Any) -> Any:
        step = self._taken()
        if step is not None:
            if step.kind != graph.num_active_loras:
                raise RuntimeError(f"a graph of kind {graph.num_active_loras} for a step of kind {step.kind}")
            self.skip_plan.count(step, has_run=True)
        return original(graph)

    def _prepared(self) -> Prepared:
        batch, block_tables = self.skip_batch
        count = batch.num_reqs
        return Prepared(
            groups=self.attn_groups,
            block_table=lambda place: block_tables[place][:count],
            lengths=batch.seq_lens[:count],
            lengths_cpu=batch.seq_lens_cpu_upper_bound[:count],
            prefilling=torch.from_numpy(batch.is_prefilling_np),
            positions=batch.positions,
        )
