"""The common base of the adapters of vLLM's two model runners: adds gates after loading, and plans each step.

An adapter is a mixin before vLLM's class, so each serves every runner of its interface, on CPUs and GPUs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext, get_forward_context
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from ..errors import UnsupportedModel
from ..loading.load import checkpoint_files
from ..model.adapter import Adapter, check_base_files, read_adapter
from .attention import Narrowing, Prepared
from .compile import CompiledLayers, is_compiled
from .gate import add_gates, layers_of
from .kv_blocks import in_buckets
from .residual import adds_residual
from .settings import Serving
from .steps import Step, Tables

Runner: Any = object

logger = logging.getLogger(f"vllm.{__name__}")

#: Of the dry runs in which layers are compiled.
TOKENS = 8

#: Attention backends that keep a step's state in its metadata only, so that more metadata can be built in the step.
ATTENTION = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")


def leave_graphs(context: ForwardContext) -> None:
    """Let vLLM run a step without its graphs of the model, which were made with all layers."""
    context.skip_compiled = True
    context.cudagraph_runtime_mode = CUDAGraphMode.NONE
    context.all_moe_layers = None  # vLLM then finds MoE layers by name, not by call order


class Skipping(Runner):
    """A model runner whose steps follow each request's schedule."""

    #: Set by the worker before the model is loaded.
    skip_serving: Serving

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and put a gate on each decoder layer."""
        super().load_model(*args, **kwargs)
        self.skip_tables = Tables(self.skip_serving.schedules, self._skip_adapter())
        layer = layers_of(self.model, self.skip_serving.num_layers)[-1]
        sums = self.skip_serving.adapter is None or adds_residual(layer, self.vllm_config, self.device)
        self.skip_plan = add_gates(self.model, self.skip_serving.num_layers)
        self.skip_plan.adds_residual = sums
        config = self.vllm_config.compilation_config
        if self.skip_tables.kinds > 1 and config.backend == "inductor" and is_compiled(self.model):
            self.skip_plan.layers = CompiledLayers(config.inductor_compile_config)

    def _skip_adapter(self) -> Adapter | None:
        """Return the server's adapter. Raises ModelError if it was trained on another model."""
        if (folder := self.skip_serving.adapter) is None:
            return None
        check_base_files(folder, checkpoint_files(self.model_config.model, self.model_config.revision))
        return read_adapter(folder).to(self.device, self.model_config.dtype).requires_grad_(False)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """Return vLLM's KV-cache specs with buckets. Raises UnsupportedModel if layers keep other state or share it."""
        specs = super().get_kv_cache_spec()
        for name, spec in specs.items():
            if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):  # other specs need more metadata
                raise UnsupportedModel(f"{name} keeps {type(spec).__name__}: only keys and values can skip layers here")
        if any(getattr(part, "kv_sharing_target_layer_name", None) for part in self.model.modules()):
            raise UnsupportedModel("layers of this model borrow each other's keys and values: not supported in vLLM")
        return in_buckets(specs, self.skip_serving, self.vllm_config)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Initialize the cache. Raises UnsupportedModel for an attention backend or block size without support."""
        super().initialize_kv_cache(*args, **kwargs)
        for group in (group for groups in self.attn_groups for group in groups):
            name = group.backend.get_name()
            if name not in ATTENTION:
                raise UnsupportedModel(f"attention by {name} keeps a step's metadata to itself: {', '.join(ATTENTION)}")
            if group.kernel_block_size is not None:
                raise UnsupportedModel(
                    f"attention by {name} reads blocks of {group.kernel_block_size} tokens: give that --block-size"
                )

    def compile_layers(self) -> None:
        """Compile the layers for steps that skip, if vLLM compiles the model: run each kind of step once."""
        layers = self.skip_plan.layers
        if not isinstance(layers, CompiledLayers):
            return
        start = time.perf_counter()
        try:
            for kind in range(self.skip_tables.kinds):
                self._rehearse(self.skip_tables.alike(kind, min(TOKENS, self.max_num_tokens)), layers)
        except Exception as error:  # the compiler has many
            self.skip_plan.layers = None
            logger.warning("skipdecode: steps that skip run without compiled layers: %s", f"{error!r}"[:500])
        self.skip_plan.forget()
        logger.info("skipdecode: compiled layers for steps that skip in %.1f s", time.perf_counter() - start)

    def _rehearse(self, step: Step, layers: CompiledLayers) -> None:
        """Run a step of no text, and compile the layers that it runs."""
        forward = self.model.forward

        def planned(*args: Any, **kwargs: Any) -> Any:
            leave_graphs(get_forward_context())
            with self.skip_plan.following(step, None), layers.compiling():
                return forward(*args, **kwargs)

        self.model.forward = planned
        try:
            self.dry_run(step.tokens)
        finally:
            self.model.forward = forward

    def dry_run(self, tokens: int) -> None:
        """Run the model on as many tokens of no text."""
        raise NotImplementedError

    @contextmanager
    def following(self, step: Step, positions: Any, prepared: Callable[[], Prepared]) -> Iterator[None]:
        """Return a context within which the model runs a step as planned; needs vLLM's forward context.

        Args:
            step: the plan.
            positions: (…, tokens), each token's position in its text. RuntimeError if these are not as many as planned.
            prepared: returns the runner's inputs of the step; not called if all its tokens run the same layers.
        """
        if positions.shape[-1] != step.tokens:
            raise RuntimeError(f"the step has {positions.shape[-1]} tokens where {step.tokens} were planned")
        narrowing = None
        if not step.is_full:
            context = get_forward_context()
            leave_graphs(context)
            narrowing = Narrowing(prepared(), context) if step.kind is None else None
        with self.skip_plan.following(step, narrowing):
            yield
