"""Narrows attention to some tokens of a step: builds attention metadata when a layer asks for it.

The metadata of a part depend on the layer's group (each group has its own blocks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.forward_context import ForwardContext
from vllm.v1.attention.backend import CommonAttentionMetadata

from .steps import Part


@dataclass(frozen=True)
class Prepared:
    """The inputs that a model runner has prepared for a step, with requests and tokens in the runner's order."""

    #: For each block table (by index), the groups of layers that share it.
    groups: Sequence[Sequence[Any]]
    #: Returns the block table with this index: (requests, blocks), on the device.
    block_table: Callable[[int], torch.Tensor]
    #: (requests,), length of each text including the step's tokens, on the device; then the same on the host.
    lengths: torch.Tensor
    lengths_cpu: torch.Tensor
    #: (requests,), True while a request computes its prompt; on the host.
    prefilling: torch.Tensor
    #: (tokens,), each token's position in its text, on the device.
    positions: torch.Tensor


class Narrowing:
    """Narrows attention in one step to the tokens of a part.

    Args:
        prepared: the model runner's inputs of the step.
        context: vLLM's forward context of the step.
    """

    def __init__(self, prepared: Prepared, context: ForwardContext) -> None:
        self.prepared, self.context = prepared, context
        #: By layer name: the index of its block table, and the group that builds its metadata.
        self.groups = {
            name: (place, group)
            for place, groups in enumerate(prepared.groups)
            for group in groups
            for name in group.layer_names
        }
        self._made: dict[int, Groups] = {}

    @contextmanager
    def __call__(self, part: Part) -> Iterator[torch.Tensor]:
        """Return a context within which attention sees only the part's tokens; yield their indices, on the device."""
        if id(part) not in self._made:
            self._made[id(part)] = Groups(self, part)
        before, made = (self.context.attn_metadata, self.context.slot_mapping), self._made[id(part)]
        # Attention reads attn_metadata; the write of keys and values reads slot_mapping.
        self.context.attn_metadata, self.context.slot_mapping = made.metadata, made.slots
        try:
            yield made.tokens
        finally:
            self.context.attn_metadata, self.context.slot_mapping = before


class ByLayer(dict[str, Any]):
    """A dict that asks a function for the value of each layer, by name (vLLM requires a dict)."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        super().__init__()
        self._make = make

    def __getitem__(self, name: str) -> Any:
        return self._make(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of layer ``name``; every name has one, so ``default`` is never used."""
        return self._make(name)

    def __bool__(self) -> bool:
        return True


class Groups:
    """Builds attention metadata and KV-cache slots, (tokens,), for one part of a step, once per group of layers."""

    def __init__(self, step: Narrowing, part: Part) -> None:
        self.groups, self.prepared = step.groups, step.prepared
        self.whole: Any = step.context.slot_mapping  # the whole step's: narrowing replaces it in the context
        self._made: dict[int, tuple[Any, torch.Tensor]] = {}
        self.metadata, self.slots = ByLayer(lambda name: self._of(name)[0]), ByLayer(lambda name: self._of(name)[1])
        prepared, device = step.prepared, step.prepared.lengths.device
        requests = torch.from_numpy(part.requests)
        self.tokens, self.requests = torch.from_numpy(part.tokens).to(device), requests.to(device)
        starts = np.zeros(len(part.counts) + 1, dtype=np.int32)
        np.cumsum(part.counts, out=starts[1:])
        # A part has the first tokens of each request in the step, so the text ends earlier by those left out.
        dropped = torch.from_numpy(part.dropped)
        lengths = (prepared.lengths_cpu[requests] - dropped).int()
        starts_cpu = torch.from_numpy(starts)
        self.common: dict[str, Any] = {
            "query_start_loc": starts_cpu.to(device),
            "query_start_loc_cpu": starts_cpu,
            "seq_lens": (prepared.lengths[self.requests] - dropped.to(device)).int(),
            "seq_lens_cpu_upper_bound": lengths,
            "num_reqs": len(part.requests),
            "num_actual_tokens": len(part.tokens),
            "max_query_len": int(part.counts.max()),
            "max_seq_len": int(lengths.max()),
            "causal": True,
            "is_prefilling": prepared.prefilling[requests],
            "positions": prepared.positions[self.tokens] if prepared.positions.ndim == 1 else None,
        }

    def _of(self, name: str) -> tuple[Any, torch.Tensor]:
        place, group = self.groups[name]
        if id(group) not in self._made:
            slots = self.whole[name][self.tokens]
            table = self.prepared.block_table(place)[self.requests]
            common = CommonAttentionMetadata(**self.common, block_table_tensor=table, slot_mapping=slots)
            # A fast build: else FlashAttention 3 would write each part's plan into the buffer of the whole step's.
            self._made[id(group)] = group.build_metadata(common, fast_build=True), slots
        return self._made[id(group)]
