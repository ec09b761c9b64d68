"""The common base of the adapters of vLLM's two model runners: adds gates after loading, and plans each step.

:func:`adapted` subclasses the class of vLLM's runner with an adapter as mixin, so each adapter serves every runner of
its interface, on CPUs and GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from ..errors import UnsupportedModel
from .blocks import in_buckets
from .configure import serving_of
from .depths import Step, Table, Tables, Whole
from .gate import add_gates
from .head import quantize_head
from .narrow import Narrowing, Prepared

if TYPE_CHECKING:
    Runner = Any
else:
    Runner = object

#: Attention backends that keep a step's state in its metadata only, so that more metadata can be built in the step.
ATTENTION = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")


class Skipping(Runner):
    """A model runner whose steps follow each request's schedule."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, put a gate on each decoder layer, and quantize the LM head if ``int8_head`` is set."""
        super().load_model(*args, **kwargs)
        serving = serving_of(self.vllm_config)
        assert serving is not None
        self.skip_tables = Tables(serving.schedules)
        self.skip_plan = add_gates(self.model, serving.num_layers)
        self.skip_int8_head = serving.int8_head
        if self.skip_int8_head:
            quantize_head(self.model)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Reload the weights, and quantize the LM head again."""
        super().reload_weights(*args, **kwargs)
        if self.skip_int8_head:
            quantize_head(self.model)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """Return vLLM's KV-cache specs with buckets. Raises UnsupportedModel if layers keep other state or share it."""
        specs = super().get_kv_cache_spec()
        for name, spec in specs.items():
            if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):  # other specs need more metadata
                raise UnsupportedModel(f"{name} keeps {type(spec).__name__}: only keys and values can skip layers here")
        if any(getattr(part, "kv_sharing_target_layer_name", None) for part in self.model.modules()):
            raise UnsupportedModel("layers of this model borrow each other's keys and values: not supported in vLLM")
        serving = serving_of(self.vllm_config)
        assert serving is not None
        return in_buckets(specs, serving, self.vllm_config)

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

    def planned(self, tables: Sequence[Table], counts: Whole, computed: Whole, prompts: Whole, positions: Any) -> Step:
        """Return the step's plan from :meth:`Tables.step`. Raises RuntimeError if ``positions`` has another length."""
        step = self.skip_tables.step(tables, counts, computed, prompts)
        if positions.shape[-1] != step.tokens:
            raise RuntimeError(f"the step has {positions.shape[-1]} tokens where {step.tokens} were planned")
        return step

    @contextmanager
    def following(self, step: Step, prepared: Callable[[], Prepared]) -> Iterator[None]:
        """Return a context within which the model runs as planned; needs vLLM's forward context."""
        # A compiled graph was traced with all layers, so only steps at full depth may use it.
        narrowing = None
        if not step.is_full:
            context = get_forward_context()
            context.skip_compiled = True
            context.cudagraph_runtime_mode = CUDAGraphMode.NONE
            context.all_moe_layers = None  # vLLM then finds MoE layers by name, not by call order
            narrowing = Narrowing(prepared(), context)
        self.skip_plan.begin(step, narrowing)
        try:
            yield
        finally:
            self.skip_plan.end()
        self.skip_plan.require_followed()


def adapted(runner: type[Any], adapter: type[Skipping]) -> type[Any]:
    """Return a subclass of vLLM's runner class with the adapter's methods in front."""
    return type(f"Skipping{runner.__name__}", (adapter, runner), {})
