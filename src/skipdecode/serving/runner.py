"""Adapts vLLM's model runners: puts gates on the model, and plans each step where the runner calls it.

An adapter is a mixin before the class of vLLM's runner, so each serves every runner of its interface, on CPUs and GPUs.
"""

import logging
from itertools import chain
from typing import Any

import numpy as np
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, has_compiled_submodule

from ..errors import UnsupportedModel
from ..loading.load import Checkpoint
from ..model.adapter import BOTTLENECK_INTERVAL, check_base_files, read_adapter
from .attention import subset_attention
from .compile import CompiledLayers
from .gate import UnlikeArguments, add_gates, adds_residual, decoder_layers
from .kv_blocks import in_buckets
from .linear import pack
from .patch import patch
from .private import with_private_layers
from .requests import speedup_of
from .settings import Serving
from .steps import DepthTable, DepthTables, StepPlan

Runner: Any = object

logger = logging.getLogger(f"vllm.{__name__}")
#: Tokens of the dry runs in which layers are compiled.
TOKENS = 8
#: Layers of a uniform step that are compiled together. A bottleneck stands before every fourth layer, so that groups of
#: four are alike: few graphs serve all.
GROUP = BOTTLENECK_INTERVAL
#: Attention backends that keep a step's state in its metadata only, so that more metadata can be built in the step.
ATTENTION = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")


def adapt(worker: Any, serving: Serving) -> None:
    """Let a worker of vLLM follow schedules, once its device is initialized and before it loads the model."""
    runner = worker.model_runner
    adapter = SkipRunnerV2 if worker.vllm_config.use_v2_model_runner else SkipRunnerV1
    runner.__class__ = type(f"Skip{type(runner).__name__}", (adapter, type(runner)), {})
    runner.skip_serving = serving

    def warm_up(original: Any) -> Any:
        runner.compile_layers()
        return original()

    patch(worker, "compile_or_warm_up_model", warm_up)
    worker.skipdecode_layers = runner.layer_tokens
    worker.skipdecode_record = runner.record


class SkipRunner(Runner):
    """Model runner whose steps follow each request's schedule."""

    #: Set before the model is loaded.
    skip_serving: Serving

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        serving = self.skip_serving
        adapter = None
        if serving.adapter is not None:
            checkpoint = Checkpoint.resolve(self.model_config.model, revision=self.model_config.revision)
            check_base_files(serving.adapter, checkpoint.folder)
            adapter = read_adapter(serving.adapter).to(self.device, self.model_config.dtype).requires_grad_(False)
        with with_private_layers(adapter, serving):
            super().load_model(*args, **kwargs)
        if adapter is not None:
            with set_current_vllm_config(self.vllm_config):
                pack(adapter)
        last = decoder_layers(self.model, serving.num_layers)[-1]
        sums = adapter is None or adds_residual(last, self.vllm_config, self.device)
        self.skip_tables = DepthTables(serving.schedules, adapter)
        self.skip_context = add_gates(self.model, serving.num_layers)
        self.skip_context.adds_residual = sums
        self.skip_step: StepPlan | None = None  # of the step that the model runs next; None: a dry run
        patch(self.model, "forward", self._planned_forward)
        config = self.vllm_config.compilation_config
        if len(self.skip_tables.uniform) > 1 and config.backend == "inductor" and has_compiled_submodule(self.model):
            self.skip_context.layers = CompiledLayers(config.inductor_compile_config)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        specs = super().get_kv_cache_spec()
        for name, spec in specs.items():
            if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):  # other specs need more metadata
                raise UnsupportedModel(f"{name} keeps {type(spec).__name__}: only keys and values can skip layers here")
        if any(getattr(part, "kv_sharing_target_layer_name", None) for part in self.model.modules()):
            raise UnsupportedModel("layers of this model share keys and values: not supported in vLLM")
        return in_buckets(specs, self.skip_serving, self.vllm_config)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        for group in chain.from_iterable(self.attn_groups):
            name = group.backend.get_name()
            if name not in ATTENTION:
                raise UnsupportedModel(f"attention by {name} keeps a step's metadata to itself: {', '.join(ATTENTION)}")
            if group.kernel_block_size is not None:
                raise UnsupportedModel(f"attention by {name} needs --block-size {group.kernel_block_size}")

    def layer_tokens(self) -> dict[str, int]:
        """Layer-tokens since the start, of the full model and those that ran."""
        return {"full": self.skip_context.full_tokens, "run": self.skip_context.run_tokens}

    def record(self, begin: bool) -> list[tuple[int, list[float]]]:
        """Begin to record norms of hidden states, or give them and end; meanwhile no step runs from a graph."""
        found = self.skip_context.recorded or []
        self.skip_context.recorded = [] if begin else None
        return found

    def compile_layers(self) -> None:
        """If vLLM compiles the model, compile the layers for steps that skip, in dry runs of each; else warn.

        Layers are compiled one by one, for steps of several kinds of tokens, and together, for uniform steps.
        """
        context = self.skip_context
        layers = context.layers
        if layers is None:
            return
        layers.compiles = True
        try:
            context.group_size = 1
            self._dry_runs()
            context.group_size = GROUP
            self._dry_runs()
        except UnlikeArguments:
            context.group_size = 1
        except Exception as error:  # the compiler has many
            context.layers = None
            context.group_size = 1
            logger.warning("skipdecode: steps that skip run without compiled layers: %s", f"{error!r}"[:500])
        layers.compiles = False
        self.skip_step = None
        context.reset_counters()

    def _dry_runs(self) -> None:
        """Run each layer set of uniform steps once."""
        tokens = min(TOKENS, self.max_num_tokens)
        for place in range(len(self.skip_tables.uniform)):
            self.skip_step = self.skip_tables.uniform_step(place, tokens)
            self.dry_run(tokens)

    def dry_run(self, tokens: int) -> None:
        """Run the model on ``tokens`` tokens of no text."""
        self._dummy_run(tokens)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        output = super().execute_model(*args, **kwargs)
        if self.skip_step is not None:
            raise RuntimeError("the step ran neither the model nor a graph of its layers")
        return output

    def _planned_forward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model as the step is planned."""
        plan, self.skip_step = self.skip_step, None
        if plan is None:
            return original(*args, **kwargs)
        assert kwargs["positions"].shape[-1] == plan.tokens, "the step has other tokens than were planned"
        layers = self.skip_context.layers
        attention = None
        if not plan.is_full or (layers is not None and layers.compiles):
            context = get_forward_context()
            context.skip_compiled = True  # vLLM's graphs of the model run all layers
            context.cudagraph_runtime_mode = CUDAGraphMode.NONE
            context.all_moe_layers = None  # vLLM then finds MoE layers by name, not by call order
            if plan.uniform is None:
                attention = subset_attention(self.attn_groups, context)
        with self.skip_context.following(plan, attention):
            return original(*args, **kwargs)


class SkipRunnerV1(SkipRunner):
    """Adapter of model runner V1: a step is planned from the runner's inputs, where it calls the model."""

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        count = batch.num_reqs
        tables = [self.skip_tables.of(speedup_of(self.requests[name].sampling_params)) for name in batch.req_ids]
        counts = np.diff(self.query_start_loc.np[: count + 1])
        computed = batch.num_computed_tokens_cpu[:count]
        self.skip_step = self.skip_tables.step(tables, counts, computed, batch.num_prompt_tokens[:count])
        return super()._model_forward(*args, **kwargs)

    def _get_nans_in_logits(self, logits: Any) -> dict[str, int]:
        # A maximum shows whether there are any in less time than it takes to count them.
        found = logits is not None and bool(logits.amax(dim=-1).isnan().any())
        return super()._get_nans_in_logits(logits) if found else {}

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        # vLLM discards the sample of a request whose prompt is not complete, and rewinds its generator. A CPU's cannot
        # rewind, and vLLM would crash: so such generators are put aside.
        generators = self.input_batch.generators
        discarded = np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs]).tolist()
        aside = {row: generators.pop(row) for row in discarded if row in generators}
        output = super().sample_tokens(*args, **kwargs)
        generators.update(aside)
        return output


class SkipRunnerV2(SkipRunner):
    """Adapter of model runner V2, which GPUs have: a step is planned where the runner gathers its requests.

    The runner then calls the model, or replays a CUDA graph of a uniform decode step. A graph replays the layers of its
    capture, so one is captured for each layer set and batch size. vLLM keeps graphs by the number of active LoRA
    adapters, which schedules refuse: here that number is the place of the layer set in :attr:`DepthTables.uniform`.
    """

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.skip_rows: dict[int, DepthTable] = {}  # of the requests, by their rows in the runner's state
        self.lora_capture_cases = list(range(len(self.skip_tables.uniform)))
        patch(self.model_state, "add_request", self._add_table)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        if self.cudagraph_manager.cudagraph_mode.has_piecewise_cudagraphs():
            raise UnsupportedModel("this model's attention takes no CUDA graph of a whole step: --enforce-eager")
        self.patch_graphs()

    def patch_graphs(self) -> None:
        """Let vLLM's manager capture and choose graphs by layer set."""
        patch(self.cudagraph_manager, "capture", self._capture)
        patch(self.cudagraph_manager, "dispatch", self._dispatch)
        patch(self.cudagraph_manager, "run_fullgraph", self._replay)

    def dry_run(self, tokens: int) -> None:
        self._dummy_run(tokens, skip_attn=True, is_profile=True)

    def gather_batch_req_state(self, *args: Any, **kwargs: Any) -> Any:
        batch, uniform = super().gather_batch_req_state(*args, **kwargs)
        if batch is not None:
            rows = batch.idx_mapping_np
            tables = [self.skip_rows[row] for row in rows.tolist()]
            computed = self.req_states.num_computed_tokens_np[rows]
            prompts = self.req_states.prompt_len.np[rows]
            self.skip_step = self.skip_tables.step(tables, batch.num_scheduled_tokens, computed, prompts)
        return batch, uniform

    def _add_table(self, original: Any, row: int, request: Any) -> None:
        original(row, request)
        self.skip_rows[row] = self.skip_tables.of(speedup_of(request.sampling_params))

    def _capture(self, original: Any, *args: Any, **kwargs: Any) -> None:
        def begin(layer_set: int, requests: int, tokens: int) -> None:
            self.skip_step = self.skip_tables.uniform_step(layer_set, tokens)

        original(*args, **kwargs | {"lora_capture_hook": begin})
        self.skip_context.reset_counters()

    def _dispatch(
        self, original: Any, num_reqs: int, num_tokens: int, uniform: int | None, num_active_loras: int, **kwargs: Any
    ) -> Any:
        plan = self.skip_step
        layer_set = 0 if plan is None else plan.uniform
        if layer_set is None or self.skip_context.recorded is not None:
            return BatchExecutionDescriptor(cg_mode=CUDAGraphMode.NONE, num_tokens=num_tokens, num_reqs=num_reqs)
        return original(num_reqs, num_tokens, uniform, num_active_loras=layer_set, **kwargs)

    def _replay(self, original: Any, graph: Any) -> Any:
        plan, self.skip_step = self.skip_step, None
        if plan is not None:
            assert plan.uniform == graph.num_active_loras, "a graph of other layers than the step's"
            self.skip_context.count(plan, has_run=True)
        return original(graph)
