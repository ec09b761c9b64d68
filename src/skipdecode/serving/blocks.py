"""Frees the blocks of layers that a request will not run again, for others or to stay in the prefix cache.

vLLM keeps one list of blocks per request and *group* of layers. Ours are the buckets (:mod:`.buckets`), told apart by
the spec that the worker gives each layer. Blocks are taken for the positions that run a bucket, and no others; vLLM's
null block stands in for the rest, as it does behind a sliding window.

Why that is exact: gates hand a layer only the tokens that run it, so a request behind its end neither reads nor writes
keys of the bucket, whatever ids the worker's block table still holds. A request counts as behind it only when no step
under way is before it. A preempted one starts at its first position and takes blocks as if it were new.
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

from ..errors import UnsupportedModel
from .requests import ends_of
from .settings import Serving

logger = init_logger(f"vllm.{__name__}")  # vLLM's handlers and level hold below its own name


@dataclass(frozen=True, kw_only=True)
class BucketSpec(FullAttentionSpec):
    """Full attention of the layers of one bucket, which share blocks with each other and with no other bucket."""

    bucket: int = 0

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        """One spec for all. Raises AssertionError, as vLLM expects, for those of several buckets."""
        if {type(spec) for spec in specs} != {cls} or len({spec.bucket for spec in specs}) > 1:
            raise AssertionError("layers of different buckets have blocks of their own")
        return replace_as(FullAttentionSpec.merge(specs), cls, bucket=specs[0].bucket)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Whether all are of this bucket: otherwise vLLM would put them into one group after all."""
        return all(isinstance(spec, BucketSpec) and spec.bucket == self.bucket for spec in kv_cache_specs.values())


def why_kept(specs: dict[str, Any], serving: Serving, config: Any) -> str:
    """Why blocks are kept until their request ends; nothing where those of retired layers are freed."""
    if serving.free_blocks is False:
        return "free_blocks is false"
    if not serving.buckets:
        return "no schedule served here retires a layer of a bucket"
    if any(type(spec) is not FullAttentionSpec for spec in specs.values()):
        return "only layers that all keep full attention's keys and values can"
    if len(specs) != serving.num_layers:
        return f"{len(specs)} layers keep keys and values, of {serving.num_layers}"
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        return "--disable-hybrid-kv-cache-manager leaves all layers one list of blocks"
    return ""


def in_buckets(specs: dict[str, Any], serving: Serving, config: Any) -> dict[str, Any]:
    """The layers' specs, each in its bucket; as they are where vLLM cannot tell the buckets apart.

    Raises:
        UnsupportedModel: ``free_blocks`` asks for what cannot be had.
    """
    reason = why_kept(specs, serving, config)
    if reason and serving.free_blocks:
        raise UnsupportedModel(f"free_blocks cannot be had: {reason}; leave it out")
    if reason:
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
    """One bucket's blocks of all requests."""

    #: From this position on, the request at hand runs none of the bucket's layers.
    end: float = math.inf

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        """As vLLM counts them, for positions before the end."""
        return super().get_num_blocks_to_allocate(request_id, self._before_end(num_tokens), *args, **kwargs)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[Any]:
        """Blocks for positions before the end, null blocks behind it."""
        new = super().allocate_new_blocks(request_id, self._before_end(num_tokens), num_tokens_main_model)
        blocks = self.req_to_blocks[request_id]
        none = [self._null_block] * (-(-num_tokens // self.block_size) - len(blocks))
        blocks.extend(none)
        return new + none

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """All blocks of the request are free once no step can run the bucket for it any more."""
        if processed_computed_tokens >= self.end:
            self._remove_blocks_in_range(request_id, 0, -(-int(self.end) // self.block_size))

    def _before_end(self, num_tokens: int) -> int:
        return int(min(num_tokens, self.end))


class BucketCoordinator(HybridKVCacheCoordinator):
    """Prefix-cache hits of requests that need some buckets' blocks only."""

    attention_groups: list[Any]

    def find_longest_cache_hit(self, block_hashes: Any, max_cache_hit_length: int) -> Any:
        """The longest prefix that every bucket has which the request runs behind it; null blocks for the others."""
        every, managers, length = self.attention_groups, self.single_type_managers, max_cache_hit_length
        needed: list[Any] = []
        try:
            while len(needed) < len(now := [g for g in every if managers[g.group_ids[0]].end > length]):
                # A shorter hit needs more buckets: those that end between the two.
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
    """Tells the managers which request they are asked about."""

    def get_computed_blocks(self, request: Any) -> Any:
        """As vLLM's."""
        self._expect(request)
        return super().get_computed_blocks(request)

    def allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, which takes a while with many buckets; most steps of most requests change no block of any."""
        processed = request.num_computed_tokens - request.num_in_flight_tokens
        if not args and not any(kwargs.values()) and self._stays(request, num_new_tokens, processed):
            return self.empty_kv_cache_blocks
        self._expect(request)
        request.skipdecode_processed = processed
        return super().allocate_slots(request, num_new_tokens, *args, **kwargs)

    def _stays(self, request: Any, num_new_tokens: int, processed: int) -> bool:
        """Whether new tokens begin no block and end none, and none is free since this request was asked about last."""
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
    """A manager that vLLM made is ours where its groups are buckets; otherwise it stays as it is."""
    if all(isinstance(group.kv_cache_spec, BucketSpec) for group in manager.kv_cache_config.kv_cache_groups):
        manager.__class__ = BucketKVCacheManager
        if isinstance(manager.coordinator, HybridKVCacheCoordinator):
            manager.coordinator.__class__ = BucketCoordinator


# Where a spec is known its manager is, in whichever process: to unpickle the one imports this. vLLM's own first: it
# registers them only while nothing is.
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(BucketSpec, BucketManager)
