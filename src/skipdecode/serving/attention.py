"""Attention restricted to some tokens of a step: metadata that are built when a layer asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.forward_context import ForwardContext
from vllm.v1.attention.backend import CommonAttentionMetadata

from .gate import SubsetAttention
from .steps import TokenSubset


@dataclass(frozen=True)
class RunnerInputs:
    """Inputs that a model runner has prepared for a step, on the device unless they say otherwise.

    Attributes:
        groups: for each block table, the groups of layers that share it.
        block_table: returns the block table with an index, (requests, blocks).
        lengths: (requests,), length of each text including the step's tokens.
        lengths_cpu: the same on the host.
        prefilling: (requests,), True while a request computes its prompt; on the host.
        positions: (tokens,), position of each token in its text.
    """

    groups: Sequence[Sequence[Any]]
    block_table: Callable[[int], torch.Tensor]
    lengths: torch.Tensor
    lengths_cpu: torch.Tensor
    prefilling: torch.Tensor
    positions: torch.Tensor


def subset_attention(inputs: RunnerInputs, context: ForwardContext) -> SubsetAttention:
    """Context manager within which attention, queries and new keys alike, covers a subset of the step's tokens."""
    known: dict[int, SubsetMetadata] = {}

    @contextmanager
    def attend(subset: TokenSubset) -> Iterator[torch.Tensor]:
        before = context.attn_metadata, context.slot_mapping
        if id(subset) not in known:
            known[id(subset)] = SubsetMetadata(inputs, before[1], subset)
        built = known[id(subset)]
        # Attention reads attn_metadata; the write of keys and values reads slot_mapping.
        context.attn_metadata = ByLayer(lambda name: built.of(name)[0])
        context.slot_mapping = ByLayer(lambda name: built.of(name)[1])
        try:
            yield built.tokens
        finally:
            context.attn_metadata, context.slot_mapping = before

    return attend


class ByLayer(dict[str, Any]):
    """Dict that computes the value of each layer name; vLLM requires a dict."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> Any:
        return self._make(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]

    def __bool__(self) -> bool:
        return True


class SubsetMetadata:
    """Attention metadata and slots, (tokens,) by layer name, of a subset of a step's tokens, once per layer group."""

    def __init__(self, inputs: RunnerInputs, slots: Any, subset: TokenSubset) -> None:
        self.inputs = inputs
        self.slots = slots
        device = inputs.lengths.device
        requests = torch.from_numpy(subset.requests)
        self.requests = requests.to(device)
        self.tokens = torch.from_numpy(subset.tokens).to(device)
        starts = torch.from_numpy(np.cumsum([0, *subset.counts], dtype=np.int32))
        # A subset has the first tokens of each request in the step, so the text ends earlier by those left out.
        dropped = torch.from_numpy(subset.dropped)
        lengths = (inputs.lengths_cpu[requests] - dropped).int()
        self.common: dict[str, Any] = {
            "query_start_loc": starts.to(device),
            "query_start_loc_cpu": starts,
            "seq_lens": (inputs.lengths[self.requests] - dropped.to(device)).int(),
            "seq_lens_cpu_upper_bound": lengths,
            "num_reqs": len(subset.requests),
            "num_actual_tokens": len(subset.tokens),
            "max_query_len": int(subset.counts.max()),
            "max_seq_len": int(lengths.max()),
            "causal": True,
            "is_prefilling": inputs.prefilling[requests],
            "positions": inputs.positions[self.tokens] if inputs.positions.ndim == 1 else None,
        }
        self._built: dict[str, tuple[Any, torch.Tensor]] = {}

    def of(self, name: str) -> tuple[Any, torch.Tensor]:
        """Metadata and slots, (tokens,), of the layer ``name``."""
        if name not in self._built:
            groups = enumerate(self.inputs.groups)
            place, group = next((place, group) for place, each in groups for group in each if name in group.layer_names)
            slots = self.slots[name][self.tokens]
            table = self.inputs.block_table(place)[self.requests]
            common = CommonAttentionMetadata(**self.common, block_table_tensor=table, slot_mapping=slots)
            # A fast build: else FlashAttention 3 would write each subset's plan into the buffer of the whole step's.
            built = group.build_metadata(common, fast_build=True), slots
            self._built |= dict.fromkeys(group.layer_names, built)
        return self._built[name]
