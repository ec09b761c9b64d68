"""Blocks of layers that requests will not run again are free: more requests run in the same memory, exact as before.

float32, greedy, eager; the demo model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from transformers import OPTConfig
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request as VRequest

from helpers.engine import (
    Reference,
    Request,
    check_among_leavers,
    check_no_block_is_lost,
    count_calls,
    demo_prompts,
    engine,
    requests_of,
    runner,
    scheduler,
    serve,
)
from skipdecode import Schedule
from skipdecode.model.config import to_config_entry
from skipdecode.serving import kv_blocks, plugin
from skipdecode.serving.kv_blocks import in_buckets
from skipdecode.serving.requests import assign_speedup
from skipdecode.serving.settings import Serving

LAYERS, BLOCK = 24, 32
#: Keys and values of all layers for 16 blocks of tokens: 24 layers, 128 wide, float32.
ROOM = 16 * (2 * LAYERS * 128 * 4 * BLOCK)
CONSTANT = Schedule.for_speedup(3, LAYERS)


@pytest.fixture(scope="module")
def reference() -> Reference:
    """What our own ``generate`` writes."""
    return Reference()


def watch(made: Any, patch: pytest.MonkeyPatch) -> list[int]:
    """How many requests run, filled step by step; every eighth step is one of :func:`free_blocks`."""
    running: list[int] = []
    its = scheduler(made)
    schedule, execute = its.schedule, runner(made).execute_model

    def scheduled(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        running.append(len(its.running))
        return output

    def executed(*args: Any, **kwargs: Any) -> Any:
        if len(running) % 8:
            return execute(*args, **kwargs)
        with free_blocks(made):
            return execute(*args, **kwargs)

    patch.setattr(its, "schedule", scheduled)
    patch.setattr(runner(made), "execute_model", executed)
    return running


@contextmanager
def free_blocks(made: Any) -> Iterator[None]:
    """Whoever reads a block that nobody holds reads rubbish, and whoever writes one is found out."""
    caches = runner(made).kv_caches
    blocks = scheduler(made).kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
    for cache in caches:
        cache[[0, *(block.block_id for block in blocks if block.block_hash is None)]] = 1e4
    free = [0, *(block.block_id for block in blocks)]
    before = [cache[free].clone() for cache in caches]
    yield
    assert all(torch.equal(cache[free], old) for cache, old in zip(caches, before, strict=True))


def test_more_requests_run_in_the_same_memory_and_prefixes_are_found_as_often(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Constant 3x, prompts as shallow: two thirds of the blocks are free at once."""
    source = random.Random(1)
    prompts = [tuple(source.choices(range(3, 1000), k=80)) for _ in range(24)]
    requests = [Request(prompt, 3.0, source.randint(16, 40)) for prompt in prompts]
    texts = reference.texts(requests, lambda _: CONSTANT.replace(prompt_layers="max"))
    seen, cached = {}, {}
    for free in (False, True):
        with engine(
            skipdecode={"prompt_layers": "max", "speedups": [3]},
            disable_hybrid_kv_cache_manager=not free,
            kv_cache_memory_bytes=ROOM,
            max_num_seqs=64,
            enable_prefix_caching=True,
            hf_overrides={"skipdecode": to_config_entry({3.0: CONSTANT})},
        ) as made:
            few = [serve(made, requests[:4]).cached for _ in range(2)]
            cached[free] = few
            seen[free] = watch(made, monkeypatch)
            assert serve(made, requests).texts() == texts
            check_no_block_is_lost(made)
    assert max(seen[True]) >= 2.5 * max(seen[False])
    assert len(seen[True]) < len(seen[False]) / 1.5
    assert cached[True] == cached[False]
    assert sum(cached[True][1].values()) > 0


def test_any_speeds_arrivals_and_ends(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Falling depths, chunks of prompts, preemption, aborts; and blocks are looked for only where a step needs some."""
    requests = requests_of(demo_prompts(reference), 64, seed=2)
    with engine(kv_cache_memory_bytes=ROOM * 3 // 4, max_num_batched_tokens=64, enable_prefix_caching=True) as made:
        running = watch(made, monkeypatch)
        preempted = count_calls(scheduler(made), "_preempt_request", monkeypatch)
        searched = count_calls(kv_blocks.BucketManager, "allocate_new_blocks", monkeypatch)
        check_among_leavers(made, requests, reference.texts(requests), seed=3, leaving=0.002)
        buckets = len(scheduler(made).kv_cache_manager.coordinator.single_type_managers)
    assert preempted
    assert len(searched) < buckets * sum(running) / 2


def specs_of(kind: Any, layers: int = LAYERS, **options: Any) -> dict[str, Any]:
    """A model's layers, as vLLM's worker describes them."""
    spec = kind(block_size=BLOCK, num_kv_heads=4, head_size=32, dtype=torch.float32, **options)
    return {f"model.layers.{layer}.self_attn.attn": spec for layer in range(layers)}


def config_of(disabled: bool = False) -> Any:
    """What of vLLM's config matters."""
    return SimpleNamespace(scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=disabled))


def serving_of(*speedups: float) -> Serving:
    """A server of constant speeds."""
    config = OPTConfig(num_hidden_layers=LAYERS, skipdecode=to_config_entry({3.0: CONSTANT}))
    return Serving(config, {"speedups": speedups})


def manager_of(count: int, caching: bool = False) -> tuple[KVCacheManager, Any]:
    """A scheduler's manager of three buckets and ``count`` blocks, and what makes a request of constant 3x."""
    serving = serving_of(3)
    specs = in_buckets(specs_of(FullAttentionSpec), serving, config_of())
    groups = [
        KVCacheGroupSpec([name for name, spec in specs.items() if spec.bucket == bucket], spec)
        for bucket, spec in enumerate(dict.fromkeys(specs.values()))
    ]
    plugin.register()
    init_none_hash(sha256)
    params = SamplingParams(extra_args={"speedup": 3})
    assign_speedup(params, serving)
    hasher = get_request_block_hasher(BLOCK, sha256)

    def request(name: str, token: int, blocks: int) -> VRequest:
        return VRequest(name, [token] * blocks * BLOCK, params, None, block_hasher=hasher)

    # One block is vLLM's null block.
    return KVCacheManager(KVCacheConfig(count + 1, [], groups), 256, BLOCK, BLOCK, enable_caching=caching), request


def test_blocks_are_kept_while_a_step_under_way_may_run_them() -> None:
    """Steps are scheduled ahead: what was given out counts as run only when its step is done."""
    manager, request = manager_of(3 * 4)
    first, second = request("first", 1, 4), request("second", 2, 2)
    free = manager.block_pool.get_num_free_blocks
    assert manager.allocate_slots(first, 4 * BLOCK) is not None
    assert free() == 0
    first.append_output_token_ids([1, 1])
    first.num_computed_tokens = first.num_in_flight_tokens = 4 * BLOCK
    assert manager.allocate_slots(first, 1) is None
    assert manager.allocate_slots(second, 2 * BLOCK) is None
    first.num_in_flight_tokens = 0
    assert manager.allocate_slots(first, 1) is not None
    assert free() == 2 * 4 - 1
    assert manager.allocate_slots(second, 2 * BLOCK) is not None
    assert free() == 1


def test_a_replay_that_finds_what_it_wrote_needs_no_blocks_of_ended_buckets() -> None:
    """A preempted request's own blocks of the first bucket are enough, once the others' are another's."""
    manager, request = manager_of(9, caching=True)
    first = request("first", 1, 2)
    free = manager.block_pool.get_num_free_blocks
    assert manager.allocate_slots(first, 2 * BLOCK) is not None
    first.append_output_token_ids([3] * (BLOCK + 1))
    first.num_computed_tokens = 2 * BLOCK
    assert manager.allocate_slots(first, BLOCK) is not None
    assert free() == 9 - 3
    first.num_computed_tokens = 3 * BLOCK
    unused = manager.block_pool.free_block_queue.get_all_free_blocks()
    manager.block_pool.evict_blocks({block.block_id for block in unused})
    manager.free(first)
    first.num_computed_tokens = 0
    hits, length, _ = manager.get_computed_blocks(first)
    assert length == 3 * BLOCK
    assert [sum(not block.is_null for block in group) for group in hits.blocks] == [3, 0, 0]
    assert manager.allocate_slots(first, 1, length, hits) is not None
    assert free() == 9 - 4
    # Another request of the same prompt runs every layer of it, and finds none for the upper ones.
    assert manager.get_computed_blocks(request("third", 1, 2))[1] == 0
    assert manager.allocate_slots(request("second", 2, 1), BLOCK) is not None
    assert free() == 9 - 4 - 3


@pytest.mark.parametrize(
    ("specs", "config", "speedup"),
    [
        (specs_of(SlidingWindowSpec, sliding_window=64), config_of(), 3),
        (specs_of(FullAttentionSpec, layers=LAYERS - 1), config_of(), 3),
        (specs_of(FullAttentionSpec), config_of(disabled=True), 3),
        (specs_of(FullAttentionSpec), config_of(), 1),
    ],
    ids=["windows", "layers", "disabled", "1x"],
)
def test_where_blocks_cannot_be_freed_they_are_kept(specs: Any, config: Any, speedup: float) -> None:
    assert in_buckets(specs, serving_of(speedup), config) == specs
