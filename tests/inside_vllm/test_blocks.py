"""Blocks of layers that requests will not run again are free: more requests run in the same memory, exact as before.

float32, greedy, eager; the embedded checkpoint. ``make test-vllm`` runs these in an environment of their own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
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

from helpers.engine import Reference, Request, engine, runner, scheduler, serve
from skipdecode import Schedule
from skipdecode.loading.load import DEMO as DEMO_FOLDER
from skipdecode.model.config import to_config_entry
from skipdecode.serving import kv_blocks as blocks
from skipdecode.serving import plugin
from skipdecode.serving.kv_blocks import in_buckets
from skipdecode.serving.requests import assign_speedup, ends_of
from skipdecode.serving.settings import Serving

LAYERS, BLOCK = 24, 32
#: Keys and values of all layers for so many blocks of tokens: 24 layers, 128 wide, float32.
ROOM = 16 * (2 * LAYERS * 128 * 4 * BLOCK)
FLAT = Schedule.for_speedup(3, LAYERS, 64, decay="constant")


@pytest.fixture(scope="module")
def reference() -> Reference:
    """What our own ``generate`` writes."""
    return Reference("demo")


@dataclass
class Watch:
    """What a scheduler did, step by step."""

    running: list[int] = field(default_factory=list)
    preempted: int = 0


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Note what an engine's scheduler does from here on, and hold free blocks against what steps do to them."""

    def start(made: Any) -> Watch:
        watch, its = Watch(), scheduler(made)
        schedule, preempt, execute = its.schedule, its._preempt_request, runner(made).execute_model

        def scheduled(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            watch.running.append(len(its.running))
            check_held(its)
            return output

        def preempted(*args: Any, **kwargs: Any) -> Any:
            watch.preempted += 1
            return preempt(*args, **kwargs)

        def executed(*args: Any, **kwargs: Any) -> Any:
            with FreeBlocks(made):
                return execute(*args, **kwargs)

        monkeypatch.setattr(its, "schedule", scheduled)
        monkeypatch.setattr(its, "_preempt_request", preempted)
        monkeypatch.setattr(runner(made), "execute_model", executed)
        return watch

    return start


def check_held(its: Any) -> None:
    """A request holds blocks for the positions that run a bucket, until none is left that does."""
    for request in its.running:
        ends = ends_of(request)
        assert ends is not None
        processed = request.num_computed_tokens - request.num_in_flight_tokens
        for manager in its.kv_cache_manager.coordinator.single_type_managers:
            end = ends[getattr(manager.kv_cache_spec, "bucket", 0)] if ends else float("inf")
            needed = 0 if processed >= end else -(-int(min(request.num_computed_tokens, end)) // BLOCK)
            blocks = manager.req_to_blocks[request.request_id]
            assert sum(not block.is_null for block in blocks) == needed


class FreeBlocks:
    """Whoever reads a block that nobody holds reads rubbish, and whoever writes one is found out."""

    def __init__(self, made: Any) -> None:
        pool = scheduler(made).kv_cache_manager.block_pool
        free = pool.free_block_queue.get_all_free_blocks()
        self.caches = list(runner(made).kv_caches)
        empty = [0, *(block.block_id for block in free if block.block_hash is None)]
        for cache in self.caches:
            cache[empty] = 1e4
        self.free = [0, *(block.block_id for block in free)]

    def __enter__(self) -> None:
        self.before = [cache[self.free].clone() for cache in self.caches]

    def __exit__(self, *_: object) -> None:
        for cache, before in zip(self.caches, self.before, strict=True):
            assert torch.equal(cache[self.free], before)


def requests_of(count: int, seed: int, speedups: tuple[float, ...]) -> list[Request]:
    """Random prompts of up to three blocks."""
    source = random.Random(seed)
    pool = [tuple(source.choices(range(3, 1000), k=source.randint(20, 90))) for _ in range(40)]
    return [Request(source.choice(pool), source.choice(speedups), source.randint(30, 64)) for _ in range(count)]


@pytest.mark.parametrize(("layers", "caching"), [(None, False), ("max", True)])
def test_more_requests_run_in_the_same_memory(
    reference: Reference, watched: Any, caching: bool, layers: str | None
) -> None:
    """Flat 3x: two thirds of the blocks are free after a prompt, and at once where prompts run no more themselves."""
    requests = requests_of(64, seed=1, speedups=(3.0,))
    seen = {}
    for free in (False, True):
        with engine(
            DEMO_FOLDER,
            disable_hybrid_kv_cache_manager=not free,
            kv_cache_memory_bytes=ROOM,
            max_num_seqs=64,
            enable_prefix_caching=caching,
            hf_overrides={"skipdecode": to_config_entry({3.0: FLAT})},
            additional_config={"skipdecode": {"prompt_layers": layers}},
        ) as made:
            watch = watched(made)
            served = serve(made, requests)
            pool = scheduler(made).kv_cache_manager.block_pool
            assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # vLLM's null block
        texts = reference.texts(requests, lambda schedule: FLAT.replace(prompt_layers=layers))
        assert [served.tokens[i] for i in range(len(requests))] == texts
        seen[free] = watch
    assert max(seen[True].running) >= (1.5 if layers is None else 2.5) * max(seen[False].running)
    assert len(seen[True].running) < len(seen[False].running)


@pytest.mark.parametrize(("options", "caching"), [({}, True), ({"prompt_layers": 12}, False)], ids=str)
def test_any_speeds_arrivals_and_ends(
    reference: Reference, watched: Any, options: dict[str, Any], caching: bool
) -> None:
    """Falling depths, chunks of prompts, preemption, aborts."""
    source = random.Random(3)
    requests = requests_of(96, seed=2, speedups=(1.0, 2.0, 3.0, 5.0))
    with engine(
        DEMO_FOLDER,
        kv_cache_memory_bytes=ROOM * 3 // 4,
        max_num_batched_tokens=64,
        enable_prefix_caching=caching,
        additional_config={"skipdecode": options},
    ) as made:
        watch = watched(made)
        served = serve(
            made,
            requests,
            arrive=lambda step: source.choice((0, 1, 2)),
            abort=lambda place, step: source.random() < 0.002,
        )
        pool = scheduler(made).kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    prompts = options.get("prompt_layers")
    texts = reference.texts(
        requests, lambda schedule: schedule.replace(prompt_layers=prompts and max(prompts, schedule.max_depth))
    )
    finished = [i for i in range(len(requests)) if served.tokens[i]]
    assert 48 < len(finished) < len(requests)
    assert [served.tokens[i] for i in finished] == [texts[i] for i in finished]
    assert watch.preempted > 0


@pytest.mark.parametrize("layers", [None, "max", 12])
def test_prefixes_are_found_as_often_as_with_all_blocks_kept(layers: Any) -> None:
    """Blocks that were freed stay in the cache; prompts of a lower depth ask for those that they run alone."""
    requests = requests_of(48, seed=4, speedups=(1.0, 2.0, 3.0, 5.0))
    cached = {}
    for free in (False, True):
        options: dict[str, Any] = {"disable_hybrid_kv_cache_manager": not free, "enable_prefix_caching": True}
        with engine(DEMO_FOLDER, additional_config={"skipdecode": {"prompt_layers": layers}}, **options) as made:
            served = [serve(made, requests) for _ in range(2)]
        cached[free] = [each.cached for each in served]
    assert cached[True] == cached[False]
    assert sum(cached[True][1].values()) > sum(cached[True][0].values()) > 0


def specs_of(kind: Any, layers: int = LAYERS, **options: Any) -> dict[str, Any]:
    """A model's layers, as vLLM's worker describes them."""
    spec = kind(block_size=BLOCK, num_kv_heads=4, head_size=32, dtype=torch.float32, **options)
    return {f"model.layers.{layer}.self_attn.attn": spec for layer in range(layers)}


def config_of(disabled: bool = False) -> Any:
    """What of vLLM's config matters."""
    return SimpleNamespace(scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=disabled))


def serving_of(**options: Any) -> Serving:
    """A server of flat 3x."""
    config = OPTConfig(num_hidden_layers=LAYERS, skipdecode=to_config_entry({3.0: FLAT}))
    return Serving(config, options)


def manager_of(count: int, caching: bool = False) -> tuple[KVCacheManager, Any]:
    """A scheduler's manager of three buckets and so many blocks, and what makes a request of flat 3x."""
    serving = serving_of(speedups=[3])
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
    first, second = request("first", 1, 2), request("second", 2, 1)
    free = manager.block_pool.get_num_free_blocks
    assert manager.allocate_slots(first, 2 * BLOCK) is not None
    assert free() == 9 - 3 * 2
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
    assert [sum(not each.is_null for each in group) for group in hits.blocks] == [3, 0, 0]
    assert manager.allocate_slots(first, 1, length, hits) is not None
    assert free() == 9 - 4
    # Another request of the same prompt runs every layer of it, and finds none for the upper ones.
    assert manager.get_computed_blocks(request("third", 1, 2))[1] == 0
    assert manager.allocate_slots(second, BLOCK) is not None
    assert free() == 9 - 4 - 3


@pytest.mark.parametrize(
    ("specs", "config", "options", "reason"),
    [
        (specs_of(SlidingWindowSpec, sliding_window=64), config_of(), {}, "full attention"),
        (specs_of(FullAttentionSpec, layers=LAYERS - 1), config_of(), {}, "23 layers keep keys and values, of 24"),
        (specs_of(FullAttentionSpec), config_of(disabled=True), {}, "--disable-hybrid-kv-cache-manager"),
        (specs_of(FullAttentionSpec), config_of(), {"speedups": [1]}, "no schedule served here"),
    ],
)
def test_where_blocks_cannot_be_freed(
    specs: Any, config: Any, options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server keeps them, and says why."""
    lines: list[str] = []
    monkeypatch.setattr(blocks.logger, "info", lambda text, *args: lines.append(text % args))
    assert in_buckets(specs, serving_of(**options), config) == specs
    assert [reason in line for line in lines] == [True]
