"""KV-cache blocks of layers that a request will not run again are freed: other requests or the prefix cache use them.

vLLM keeps one list of blocks per request and *group* of layers. Here the groups are buckets of layers: each layer's
KV-cache spec names its bucket. A request takes a bucket's blocks only for positions before the bucket's *end*, the
first position that runs none of its layers, and vLLM's null block for later ones, as with a sliding window.

This is exact: gates give a layer only the tokens that run it, so from the end on a request neither reads nor writes the
bucket's keys, whatever ids the worker's block table still holds. Blocks are freed only when no step in flight is before
the end. A preempted request starts again at its first position and takes blocks like a new one.
"""

import logging
import math
from dataclasses import dataclass
from typing import Any

from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, replace_as
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import RequestStatus

from .requests import bucket_ends
from .settings import Serving

logger = logging.getLogger(f"vllm.{__name__}")


@dataclass(frozen=True, kw_only=True)
class BucketSpec(FullAttentionSpec):
    """KV-cache spec of full-attention layers that share one list of blocks per request."""

    bucket: int = 0

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        if len(set(specs)) > 1:  # the error is the one that vLLM expects
            raise AssertionError("layers of different buckets have blocks of their own")
        return specs[0]

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        return all(isinstance(spec, BucketSpec) and spec.bucket == self.bucket for spec in kv_cache_specs.values())


def in_buckets(specs: dict[str, Any], serving: Serving, config: Any) -> dict[str, Any]:
    """Specs of layers with their buckets, or unchanged where blocks cannot be freed early.

    All layers must keep full attention's keys and values, and vLLM's hybrid KV-cache manager must be on.
    """
    full = len(specs) == serving.num_layers and all(type(spec) is FullAttentionSpec for spec in specs.values())
    if not serving.buckets or not full or config.scheduler_config.disable_hybrid_kv_cache_manager:
        logger.info("skipdecode: keys and values of all layers are kept until a request ends")
        return specs
    logger.info("skipdecode: keys and values are freed as layers retire, in %d buckets", len(serving.buckets))
    place = {layer: place for place, layers in enumerate(serving.buckets) for layer in layers}
    return {name: replace_as(spec, BucketSpec, bucket=place[extract_layer_index(name)]) for name, spec in specs.items()}


class BucketManager(FullAttentionManager):
    """Manager of one bucket's blocks for all requests."""

    #: The first position from which the current request runs none of the bucket's layers.
    end: Any = math.inf

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        return super().get_num_blocks_to_allocate(request_id, min(num_tokens, self.end), *args, **kwargs)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[Any]:
        # Null blocks stand for positions after the end.
        new = super().allocate_new_blocks(request_id, min(num_tokens, self.end), num_tokens_main_model)
        blocks = self.req_to_blocks[request_id]
        nulls = [self._null_block] * (-(-num_tokens // self.block_size) - len(blocks))
        blocks.extend(nulls)
        return new + nulls

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        if processed_computed_tokens >= self.end:
            self._remove_blocks_in_range(request_id, 0, -(-self.end // self.block_size))


class BucketCoordinator(HybridKVCacheCoordinator):
    """Coordinator that finds prefix-cache hits for requests that need the blocks of some buckets only."""

    attention_groups: list[Any]

    def find_longest_cache_hit(self, block_hashes: Any, max_cache_hit_length: int) -> Any:
        # The longest prefix that is cached in all buckets that run after it; the others get null blocks.
        managers = self.single_type_managers
        every = self.attention_groups
        length = max_cache_hit_length
        needed: list[Any] = []
        try:
            while True:
                # A shorter hit needs more buckets: those that end between the shorter and the longer length.
                running = [group for group in every if managers[group.group_ids[0]].end > length]
                if len(running) == len(needed):
                    break
                self.attention_groups = needed = running
                found, length, uncached = super().find_longest_cache_hit(block_hashes, max_cache_hit_length)
        finally:
            self.attention_groups = every
        hits = list(found)
        for place, manager in enumerate(managers):
            if manager.end <= length:
                hits[place] = [self.block_pool.null_block] * (length // manager.block_size)
        return tuple(hits), length, uncached


class BucketKVCacheManager(KVCacheManager):
    """Manager that sets each bucket's ``end`` for the current request before vLLM's code runs."""

    def get_computed_blocks(self, request: Any) -> Any:
        self._set_ends(request)
        return super().get_computed_blocks(request)

    def allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """Allocate as vLLM does, but without its slow search through all buckets if the step changes no block."""
        processed = request.num_computed_tokens - request.num_in_flight_tokens
        if not args and not any(kwargs.values()) and self._changes_nothing(request, num_new_tokens, processed):
            return self.empty_kv_cache_blocks
        self._set_ends(request)
        request.skipdecode_processed = processed
        return super().allocate_slots(request, num_new_tokens, *args, **kwargs)

    def _changes_nothing(self, request: Any, num_new_tokens: int, processed: int) -> bool:
        """Whether the tokens neither start nor fill a block, and no bucket ended since the last allocation."""
        size = self.coordinator.single_type_managers[0].block_size
        inside = request.num_computed_tokens % size
        if request.status != RequestStatus.RUNNING or not inside or inside + num_new_tokens >= size:
            return False
        ends = bucket_ends(request) or ()
        return not any(request.skipdecode_processed < end <= processed for end in ends)

    def _set_ends(self, request: Any) -> None:
        ends = bucket_ends(request)
        for manager in self.coordinator.single_type_managers:
            manager.end = math.inf if ends is None else ends[manager.kv_cache_spec.bucket]


# Registered on import: a process that unpickles a BucketSpec imports this module, so it knows the manager too. vLLM
# registers its own specs only into an empty registry, so they go first.
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(BucketSpec, BucketManager)
