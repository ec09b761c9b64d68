"""Narrows attention to some tokens of a step: makes its metadata for a layer when that layer asks.

A part's metadata differ by group of layers (their blocks), and one layer asks for those of its group alone.
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

from .depths import Part


@dataclass(frozen=True)
class Prepared:
    """What a model runner has prepared for a step; requests and tokens in its order."""

    #: By place of a block table, the groups of layers that share it.
    groups: Sequence[Sequence[Any]]
    #: By such a place: (requests, blocks), on the device.
    block_table: Callable[[int], torch.Tensor]
    #: (requests,), tokens of the text behind the step: on the device, and on the host.
    lengths: torch.Tensor
    lengths_cpu: torch.Tensor
    #: (requests,), whether the request reads its prompt; on the host.
    prefilling: torch.Tensor
    #: (tokens,), on the device.
    positions: torch.Tensor


class Narrowing:
    """A context manager per part of one step.

    Args:
        prepared: by the model runner.
        context: the step's.
    """

    def __init__(self, prepared: Prepared, context: ForwardContext) -> None:
        self.prepared, self.context = prepared, context
        #: By layer name: which block table, and what makes its metadata.
        self.groups = {
            name: (place, group)
            for place, groups in enumerate(prepared.groups)
            for group in groups
            for name in group.layer_names
        }
        self._made: dict[int, tuple[ByLayer, ByLayer]] = {}

    @contextmanager
    def __call__(self, part: Part) -> Iterator[None]:
        """Within it, attention knows only the part's tokens."""
        if id(part) not in self._made:
            groups = Groups(self, part)
            self._made[id(part)] = ByLayer(groups.metadata), ByLayer(groups.slots)
        before = self.context.attn_metadata, self.context.slot_mapping
        # Attention reads the one, and the write of keys and values the other.
        self.context.attn_metadata, self.context.slot_mapping = self._made[id(part)]
        try:
            yield
        finally:
            self.context.attn_metadata, self.context.slot_mapping = before


class ByLayer(dict[str, Any]):
    """Values by layer name, made when they are asked for. (vLLM asks for a dict.)"""

    def __init__(self, make: Callable[[str], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> Any:
        self[name] = made = self._make(name)
        return made

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict that has all layers."""
        return self[name]

    def __bool__(self) -> bool:
        return True


class Groups:
    """Metadata and slots of the groups of layers for the tokens and requests of one part."""

    def __init__(self, step: Narrowing, part: Part) -> None:
        self.groups, self.prepared = step.groups, step.prepared
        self.whole: Any = step.context.slot_mapping  # of the whole step: ours takes its place
        self._made: dict[int, tuple[Any, torch.Tensor]] = {}
        prepared, device = step.prepared, step.prepared.lengths.device
        requests = torch.from_numpy(part.requests)
        self.tokens, self.requests = torch.from_numpy(part.tokens).to(device), requests.to(device)
        starts = np.zeros(len(part.counts) + 1, dtype=np.int32)
        np.cumsum(part.counts, out=starts[1:])
        # Every request's tokens in the part are its first ones in the step: its text ends that much earlier.
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

    def metadata(self, name: str) -> Any:
        """What the layer's attention reads."""
        return self._of(name)[0]

    def slots(self, name: str) -> torch.Tensor:
        """(tokens,), where the layer's keys and values go."""
        return self._of(name)[1]

    def _of(self, name: str) -> tuple[Any, torch.Tensor]:
        place, group = self.groups[name]
        if id(group) not in self._made:
            slots = self.whole[name][self.tokens]
            table = self.prepared.block_table(place)[self.requests]
            common = CommonAttentionMetadata(**self.common, block_table_tensor=table, slot_mapping=slots)
            self._made[id(group)] = group.build_metadata(common), slots
        return self._made[id(group)]
