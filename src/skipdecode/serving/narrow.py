"""Attention narrowed to the tokens of a part: what it reads of a step, made for a layer when that layer asks.

A part's metadata differ by group of layers (their blocks), and one layer asks for those of its group alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.forward_context import ForwardContext
from vllm.v1.attention.backend import CommonAttentionMetadata

from .depths import Part


class Narrowing:
    """A context manager per part of one step.

    Args:
        runner: vLLM's, as it has prepared the step.
        context: the step's.
    """

    def __init__(self, runner: Any, context: ForwardContext) -> None:
        self.runner, self.context = runner, context
        #: By layer name: which block table, and what makes its metadata.
        self.groups = {
            name: (place, group)
            for place, groups in enumerate(runner.attn_groups)
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
        self.groups, self.runner = step.groups, step.runner
        self.whole: Any = step.context.slot_mapping  # of the whole step: ours takes its place
        self._made: dict[int, tuple[Any, torch.Tensor]] = {}
        runner, device, batch = step.runner, step.runner.device, step.runner.input_batch
        requests = torch.from_numpy(part.requests)
        self.tokens, self.requests = torch.from_numpy(part.tokens).to(device), requests.to(device)
        starts = np.zeros(len(part.counts) + 1, dtype=np.int32)
        np.cumsum(part.counts, out=starts[1:])
        # Every request's tokens in the part are its first ones in the step: its text ends that much earlier.
        dropped = torch.from_numpy(part.dropped)
        lengths = (runner.optimistic_seq_lens_cpu[requests] - dropped).int()
        starts_cpu = torch.from_numpy(starts)
        self.common: dict[str, Any] = {
            "query_start_loc": starts_cpu.to(device),
            "query_start_loc_cpu": starts_cpu,
            "seq_lens": (runner.seq_lens[: batch.num_reqs][self.requests] - dropped.to(device)).int(),
            "seq_lens_cpu_upper_bound": lengths,
            "num_reqs": len(part.requests),
            "num_actual_tokens": len(part.tokens),
            "max_query_len": int(part.counts.max()),
            "max_seq_len": int(lengths.max()),
            "causal": True,
            "is_prefilling": batch.num_computed_tokens_cpu_tensor[requests]
            < batch.num_prompt_tokens_cpu_tensor[requests],
            "positions": runner.positions[self.tokens] if runner.positions.ndim == 1 else None,
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
            batch = self.runner.input_batch
            slots = self.whole[name][self.tokens]
            table = batch.block_table[place].get_device_tensor(batch.num_reqs)[self.requests]
            common = CommonAttentionMetadata(**self.common, block_table_tensor=table, slot_mapping=slots)
            self._made[id(group)] = group.build_metadata(common), slots
        return self._made[id(group)]
