"""Frees the KV-cache blocks of layers that a request will not run again: other requests or the prefix cache use them.

vLLM keeps one list of blocks per request and *group* of layers. Here the groups are buckets (:mod:`.buckets`): each
layer's KV-cache spec names its bucket. A request takes a bucket's blocks only for positions before the bucket's *end*,
the first position that runs none of its layers, and vLLM's null block for later ones, as with a sliding window.

This is exact: gates give a layer only the tokens that run it, so from the end on a request neither reads nor writes the
bucket's keys, whatever ids the worker's block table still holds. Blocks are freed only when no step in flight is before
the end. A preempted request starts again at its first position and takes blocks like a new one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, replace_as
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import RequestStatus

from .requests import ends_of
from .settings import Serving

logger = init_logger(f"vllm.{__name__}")  # a child of vLLM's logger has its handlers and level


@dataclass(frozen=True, kw_only=True)
class BucketSpec(FullAttentionSpec):
    """The KV-cache spec of the full-attention layers in one bucket, which share one list of blocks per request."""

    bucket: int = 0

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        """Return one spec for all layers. Raises AssertionError, as vLLM expects, if they are in several buckets."""
        if {type(spec) for spec in specs} != {cls} or len({spec.bucket for spec in specs}) > 1:
            raise AssertionError("layers of different buckets have blocks of their own")
        return replace_as(FullAttentionSpec.merge(specs), cls, bucket=specs[0].bucket)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Return whether all specs are of this bucket: vLLM puts uniform specs into one group."""
        return all(isinstance(spec, BucketSpec) and spec.bucket == self.bucket for spec in kv_cache_specs.values())


def in_buckets(specs: dict[str, Any], serving: Serving, config: Any) -> dict[str, Any]:
    """Return the layers' specs with their buckets, or unchanged where blocks cannot be freed early."""
    reasons = {
        "no schedule served here retires a layer of a bucket": not serving.buckets,
        "only layers that all keep full attention's keys and values can": any(
            type(spec) is not FullAttentionSpec for spec in specs.values()
        ),
        f"{len(specs)} layers keep keys and values, of {serving.num_layers}": len(specs) != serving.num_layers,
        "--disable-hybrid-kv-cache-manager": config.scheduler_config.disable_hybrid_kv_cache_manager,
    }
    for reason, holds in reasons.items():
        if holds:
            logger.info("skipdecode: keys and values of all layers are kept until a request ends: %s", reason)
            return specs
    logger.info(
        "skipdecode: keys and values are freed as layers retire, in %d buckets of %d layers",
        len(serving.buckets),
        len(serving.buckets[0]),
    )
    place = {layer: place for place, layers in enumerate(serving.buckets) for layer in layers}
    return {name: replace_as(spec, BucketSpec, bucket=place[extract_layer_index(name)]) for name, spec in specs.items()}


class BucketManager(FullAttentionManager):
    """Manages the blocks of one bucket for all requests."""

    #: The first position from which the current request runs none of the bucket's layers.
    end: float = math.inf

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        """Count, as vLLM does, the blocks that positions before the bucket's end need."""
        return super().get_num_blocks_to_allocate(request_id, self._before_end(num_tokens), *args, **kwargs)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[Any]:
        """Allocate blocks up to the bucket's end, null blocks for later positions, and return the new ones."""
        new = super().allocate_new_blocks(request_id, self._before_end(num_tokens), num_tokens_main_model)
        blocks = self.req_to_blocks[request_id]
        none = [self._null_block] * (-(-num_tokens // self.block_size) - len(blocks))
        blocks.extend(none)
        return new + none

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free all blocks of the request once no step can run the bucket for it."""
        if processed_computed_tokens >= self.end:
            self._remove_blocks_in_range(request_id, 0, -(-int(self.end) // self.block_size))

    def _before_end(self, num_tokens: int) -> int:
        return int(min(num_tokens, self.end))


class BucketCoordinator(HybridKVCacheCoordinator):
    """Finds prefix-cache hits for requests that need the blocks of some buckets only."""

    attention_groups: list[Any]

    def find_longest_cache_hit(self, block_hashes: Any, max_cache_hit_length: int) -> Any:
        """Return vLLM's answer for the longest prefix in all buckets that run after it; others get null blocks."""
        every, managers, length = self.attention_groups, self.single_type_managers, max_cache_hit_length
        needed: list[Any] = []
        try:
            while len(needed) < len(now := [g for g in every if managers[g.group_ids[0]].end > length]):
                # A shorter hit needs more buckets: those that end between the shorter and the longer length.
                self.attention_groups = needed = now
                found, length, uncached = super().find_longest_cache_hit(block_hashes, max_cache_hit_length)
        finally:
            self.attention_groups = every
        used = {group for each in needed for group in each.group_ids}
        null = [self.block_pool.null_block]
        hits = tuple(
            blocks if group in used else null * (length // managers[group].block_size)
            for group, blocks in enumerate(found)
        )
        return hits, length, uncached


class BucketKVCacheManager(KVCacheManager):
    """Sets each bucket manager's ``end`` for the current request before vLLM calls it."""

    def get_computed_blocks(self, request: Any) -> Any:
        """Look up the prefix cache, as vLLM does, in the buckets that the request runs."""
        self._expect(request)
        return super().get_computed_blocks(request)

    def allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """Allocate as vLLM does, but without its slow search through all buckets if the step changes no block."""
        processed = request.num_computed_tokens - request.num_in_flight_tokens
        if not args and not any(kwargs.values()) and self._stays(request, num_new_tokens, processed):
            return self.empty_kv_cache_blocks
        self._expect(request)
        request.skipdecode_processed = processed
        return super().allocate_slots(request, num_new_tokens, *args, **kwargs)

    def _stays(self, request: Any, num_new_tokens: int, processed: int) -> bool:
        """Return whether the tokens neither start nor fill a block, and no bucket ended since the last allocation."""
        size = self.coordinator.single_type_managers[0].block_size
        inside = request.num_computed_tokens % size
        if request.status != RequestStatus.RUNNING or not inside or inside + num_new_tokens >= size:
            return False
        ends = ends_of(request)
        return ends is None or not any(request.skipdecode_processed < end <= processed for end in ends)

    def _expect(self, request: Any) -> None:
        ends = ends_of(request)
        for manager in self.coordinator.single_type_managers:
            manager.end = math.inf if ends is None else ends[manager.kv_cache_spec.bucket]


def adopt(manager: KVCacheManager) -> None:
    """Turn vLLM's manager, whose groups are buckets, into a :class:`BucketKVCacheManager`."""
    manager.__class__ = BucketKVCacheManager
    if isinstance(manager.coordinator, HybridKVCacheCoordinator):
        manager.coordinator.__class__ = BucketCoordinator


# Registered on import: a process that unpickles a BucketSpec imports this module, so it knows the manager too. vLLM
# registers its own specs only into an empty registry, so they go first.
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(BucketSpec, BucketManager)
