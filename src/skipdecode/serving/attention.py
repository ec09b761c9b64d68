"""Attention restricted to some tokens of a step: metadata that are built when a layer asks for them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from vllm.forward_context import ForwardContext
from vllm.v1.attention.backend import CommonAttentionMetadata

from .gate import SubsetAttention
from .steps import TokenSubset


def subset_attention(groups: Sequence[Sequence[Any]], context: ForwardContext) -> SubsetAttention:
    """Context manager within which attention, queries and new keys alike, covers a subset of the step's tokens.

    ``groups`` are the runner's attention groups, of which each has the layers that share their metadata.
    """
    metadata_of = cache(partial(SubsetMetadata, groups, context))

    @contextmanager
    def attend(subset: TokenSubset) -> Iterator[torch.Tensor]:
        built = metadata_of(subset)
        before = context.attn_metadata, context.slot_mapping
        # Attention reads attn_metadata; the write of keys and values reads slot_mapping.
        context.attn_metadata = ByLayer(built.of)
        context.slot_mapping = ByLayer(lambda name: built.of(name).slot_mapping)
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
    """Attention metadata of a subset of a step's tokens, built once per layer group."""

    def __init__(self, groups: Sequence[Sequence[Any]], context: ForwardContext, subset: TokenSubset) -> None:
        self.groups = groups
        self.step: Any = context.attn_metadata  # by layer name, of all tokens
        self.slots: Any = context.slot_mapping
        one = next(iter(self.step.values()))  # only slots and block tables differ between layers
        device = one.seq_lens.device
        self.requests = torch.from_numpy(subset.requests).to(device)
        self.tokens = torch.from_numpy(subset.tokens).to(device)
        starts = torch.from_numpy(np.cumsum([0, *subset.counts], dtype=np.int32))
        # A subset has the first tokens of each request in the step, so the text ends earlier by those left out.
        lengths = one.seq_lens[self.requests] - torch.from_numpy(subset.dropped).to(device)
        self.common: dict[str, Any] = {
            "query_start_loc": starts.to(device),
            "query_start_loc_cpu": starts,
            "seq_lens": lengths.int(),
            "num_reqs": len(subset.requests),
            "num_actual_tokens": len(subset.tokens),
            "max_query_len": int(subset.counts.max()),
            "max_seq_len": one.max_seq_len,  # at most
        }
        self._built: dict[str, Any] = {}

    def of(self, name: str) -> Any:
        """Metadata of the layer ``name``."""
        if name not in self._built:
            group = next(group for group in chain.from_iterable(self.groups) if name in group.layer_names)
            slots = self.slots[name][self.tokens]
            table = self.step[name].block_table[self.requests]
            common = CommonAttentionMetadata(**self.common, block_table_tensor=table, slot_mapping=slots)
            # A fast build: else FlashAttention 3 would write each subset's plan into the buffer of the whole step's.
            built = group.build_metadata(common, fast_build=True)
            self._built |= dict.fromkeys(group.layer_names, built)
        return self._built[name]
