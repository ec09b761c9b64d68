"""Blocks of layers that requests will not run again are free: more requests run in the same memory, exact as before.

float32, greedy, eager; the embedded checkpoint. ``make test-vllm`` runs these in an environment of their own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from helpers.engine import Reference, Request, engine, runner, scheduler, serve

from skipdecode import Schedule
from skipdecode.core.checkpoint_config import to_config_entry
from skipdecode.errors import UnsupportedModel
from skipdecode.generation.loading import DEMO as DEMO_FOLDER
from skipdecode.serving.requests import ends_of

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
            with untouched_free_blocks(made):
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


class untouched_free_blocks:
    """Whoever reads a block that nobody holds reads rubbish, and whoever writes one is found out."""

    def __init__(self, made: Any) -> None:
        pool = scheduler(made).kv_cache_manager.block_pool
        free = pool.free_block_queue.get_all_free_blocks()
        self.caches = [cache for cache in runner(made).kv_caches]
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


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("layers", [None, "max"])
def test_more_requests_run_in_the_same_memory(
    reference: Reference, watched: Any, caching: bool, layers: str | None
) -> None:
    """Flat 3x: two thirds of the blocks are free after a prompt, and at once where prompts run no more themselves."""
    requests = requests_of(64, seed=1, speedups=(3.0,))
    seen = {}
    for free in (False, True):
        options: dict[str, Any] = {"free_blocks": free} | ({"prompt_layers": layers} if layers else {})
        with engine(
            DEMO_FOLDER,
            kv_cache_memory_bytes=ROOM,
            max_num_seqs=64,
            enable_prefix_caching=caching,
            hf_overrides={"skipdecode": to_config_entry({3.0: FLAT})},
            additional_config={"skipdecode": options},
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


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("options", [{}, {"prompt_layers": 12}], ids=str)
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
        additional_config={"skipdecode": {"free_blocks": True} | options},
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
        options = {"free_blocks": free} | ({"prompt_layers": layers} if layers else {})
        with engine(DEMO_FOLDER, enable_prefix_caching=True, additional_config={"skipdecode": options}) as made:
            served = [serve(made, requests) for _ in range(2)]
        cached[free] = [each.cached for each in served]
    assert cached[True] == cached[False]
    assert sum(cached[True][1].values()) > sum(cached[True][0].values()) > 0
