"""Common to the adapters of vLLM's two model runners: gates after loading, and a plan for each step.

A class of ours stands before the class of the runner that vLLM made (:func:`adapted`), so that each adapter serves
every runner of its interface, on CPUs and GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.config import CUDAGraphMode
from vllm.envs import VLLM_LOG_STATS_INTERVAL
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from ..errors import UnsupportedModel
from .blocks import in_buckets
from .configure import serving_of
from .depths import Step, Table, Tables, Whole
from .gate import add_gates
from .head import quantize_head
from .metrics import LayerLog
from .narrow import Narrowing, Prepared

if TYPE_CHECKING:
    Runner = Any
else:
    Runner = object

#: Kinds of attention that keep nothing of a step behind what they make of its metadata: ours are made amid the step.
ATTENTION = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")

logger = init_logger(f"vllm.{__name__}")  # vLLM's handlers and level hold below its own name


class Skipping(Runner):
    """A model runner whose steps follow each request's schedule."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model; put a gate on each decoder layer, and int8 weights into the head where that is asked for."""
        super().load_model(*args, **kwargs)
        serving = serving_of(self.vllm_config)
        assert serving is not None
        self.skip_tables = Tables(serving.schedules)
        self.skip_plan = add_gates(self.model, serving.num_layers)
        self.skip_int8_head = serving.int8_head
        if self.skip_int8_head:
            quantize_head(self.model)
        say = logger.info if self.parallel_config.rank == 0 else logger.debug
        self.skip_log = LayerLog(self.skip_plan, VLLM_LOG_STATS_INTERVAL, say)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's; the head's int8 weights are made anew."""
        super().reload_weights(*args, **kwargs)
        if self.skip_int8_head:
            quantize_head(self.model)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """What vLLM's says, in buckets. Raises UnsupportedModel where layers keep more than keys and values."""
        specs = super().get_kv_cache_spec()
        for name, spec in specs.items():
            if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):  # kinds of theirs need more metadata
                raise UnsupportedModel(f"{name} keeps {type(spec).__name__}: only keys and values can skip layers here")
        if any(getattr(part, "kv_sharing_target_layer_name", None) for part in self.model.modules()):
            raise UnsupportedModel("layers of this model borrow each other's keys and values: not supported in vLLM")
        serving = serving_of(self.vllm_config)
        assert serving is not None
        return in_buckets(specs, serving, self.vllm_config)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's. Raises UnsupportedModel for a kind of attention whose metadata cannot be made twice in a step."""
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
        """The plan of a step whose tokens are at ``positions``; the rest as for :meth:`Tables.step`."""
        step = self.skip_tables.step(tables, counts, computed, prompts)
        if positions.shape[-1] != step.tokens:
            raise RuntimeError(f"the step has {positions.shape[-1]} tokens where {step.tokens} were planned")
        return step

    @contextmanager
    def following(self, step: Step, prepared: Callable[[], Prepared]) -> Iterator[None]:
        """Within it, in vLLM's forward context, the model runs as planned."""
        # A compiled graph holds the layers that ran when it was traced: all. It serves full steps, and only those.
        narrowing = None
        if not step.is_full:
            context = get_forward_context()
            context.skip_compiled = True
            context.cudagraph_runtime_mode = CUDAGraphMode.NONE
            context.all_moe_layers = None  # experts are counted off in the order of all layers; by name they need not
            narrowing = Narrowing(prepared(), context)
        self.skip_plan.begin(step, narrowing)
        try:
            yield
        finally:
            self.skip_plan.end()
            self.skip_log.step()
        self.skip_plan.require_followed()


def adapted(runner: type[Any], adapter: type[Skipping]) -> type[Any]:
    """The class of a runner of vLLM's with one of our adapters before it."""
    return type(f"Skipping{runner.__name__}", (adapter, runner), {})
