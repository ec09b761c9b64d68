"""vLLM's model runner V1, adapted: gates after loading, a plan per step, attention narrowed to a layer's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext, get_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from ..errors import UnsupportedModel
from .blocks import in_buckets
from .configure import serving_of
from .depths import Part, Tables
from .gate import add_gates
from .requests import speedup_of


class SkipRunner(CPUModelRunner):
    """vLLM's runner, whose steps follow each request's schedule."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model; put a gate on each decoder layer."""
        super().load_model(*args, **kwargs)
        serving = serving_of(self.vllm_config)
        assert serving is not None
        self.skip_tables = Tables(serving.schedule)
        self.skip_plan = add_gates(self.model, serving.num_layers)

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
        count = self.input_batch.num_reqs
        counts = np.diff(self.query_start_loc.np[: count + 1]).astype(np.int64)
        step = self.skip_tables.step(
            [speedup_of(self.requests[name].sampling_params) for name in self.input_batch.req_ids],
            counts,
            self.input_batch.num_computed_tokens_cpu[:count].astype(np.int64),
            self.input_batch.num_prompt_tokens[:count].astype(np.int64),
        )
        if positions.shape[-1] != step.tokens:
            raise RuntimeError(f"the step has {positions.shape[-1]} tokens where {step.tokens} were planned")
        # A compiled graph holds the layers that ran when it was traced: all. It serves full steps, and only those.
        if not step.is_full:
            context.skip_compiled = True
            context.cudagraph_runtime_mode = CUDAGraphMode.NONE
            context.all_moe_layers = None  # experts are counted off in the order of all layers; by name they need not
        self.skip_plan.begin(step, self._narrowing(context, counts))
        try:
            return super()._model_forward(input_ids, positions, *args, **kwargs)
        finally:
            self.skip_plan.end()

    def _narrowing(self, context: ForwardContext, counts: Any) -> Any:
        """A context manager per part, in which attention knows only the part's tokens; made once per part."""
        made: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}

        @contextmanager
        def narrowed(part: Part) -> Iterator[None]:
            if id(part) not in made:
                made[id(part)] = self._metadata(part, context)
            before = context.attn_metadata, context.slot_mapping
            # Attention reads the one, and the write of keys and values the other.
            context.attn_metadata, context.slot_mapping = made[id(part)]
            try:
                yield
            finally:
                context.attn_metadata, context.slot_mapping = before

        return narrowed

    def _metadata(self, part: Part, context: ForwardContext) -> tuple[dict[str, Any], dict[str, Any]]:
        """Attention's metadata and slots by layer name, for the part's tokens and requests."""
        tokens, requests = torch.from_numpy(part.tokens), torch.from_numpy(part.requests)
        starts = np.zeros(len(part.counts) + 1, dtype=np.int32)
        np.cumsum(part.counts, out=starts[1:])
        # Every request's tokens in the part are its first ones in the step: its text ends that much earlier.
        dropped = torch.from_numpy(part.dropped)
        lengths = (self.seq_lens[: self.input_batch.num_reqs][requests.to(self.device)] - dropped.to(self.device)).int()
        lengths_cpu = (self.optimistic_seq_lens_cpu[requests] - dropped).int()
        starts_cpu = torch.from_numpy(starts)
        computed = self.input_batch.num_computed_tokens_cpu_tensor[requests]
        prompts = self.input_batch.num_prompt_tokens_cpu_tensor[requests]
        metadata: dict[str, Any] = {}
        slots: dict[str, Any] = {}
        for group_index, groups in enumerate(self.attn_groups):
            table = self.input_batch.block_table[group_index].get_device_tensor(self.input_batch.num_reqs)
            for group in groups:
                whole = context.slot_mapping[group.layer_names[0]]
                common = CommonAttentionMetadata(
                    query_start_loc=starts_cpu.to(self.device),
                    query_start_loc_cpu=starts_cpu,
                    seq_lens=lengths,
                    seq_lens_cpu_upper_bound=lengths_cpu,
                    num_reqs=len(part.requests),
                    num_actual_tokens=len(part.tokens),
                    max_query_len=int(part.counts.max()),
                    max_seq_len=int(lengths_cpu.max()),
                    block_table_tensor=table[requests.to(self.device)],
                    slot_mapping=whole[tokens.to(self.device)],
                    causal=True,
                    is_prefilling=computed < prompts,
                    positions=self.positions[tokens.to(self.device)] if self.positions.ndim == 1 else None,
                )
                built = group.build_metadata(common)
                for name in group.layer_names:
                    metadata[name], slots[name] = built, common.slot_mapping
        return metadata, slots
