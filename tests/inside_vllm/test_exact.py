"""Inside vLLM every request gets the tokens that our own ``generate`` writes for it alone, whatever shares its steps.

float32, greedy, eager; the demo model. ``make test-vllm`` runs these in an environment of their own, and
``make test-vllm-v2`` runs them with model runner V2, with fewer requests, since its kernels are interpreted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from helpers.engine import (
    SPEEDUPS,
    Reference,
    Request,
    check_among_leavers,
    check_layers,
    count_calls,
    demo_prompts,
    engine,
    requests_of,
    scheduler,
    serve,
)
from helpers.interpreted import V2
from skipdecode import Schedule

#: Of the requests, one in so many is made.
FEWER = 6 if V2 else 1


@pytest.fixture(scope="module")
def reference() -> Reference:
    """What our own ``generate`` writes."""
    return Reference()


@pytest.fixture(scope="module")
def prompts(reference: Reference) -> list[tuple[int, ...]]:
    return demo_prompts(reference)


class TestRoomy:
    """An engine with room for everything, and prefix caching."""

    @pytest.fixture(scope="class")
    def roomy(self) -> Iterator[Any]:
        with engine(enable_prefix_caching=True) as made:
            yield made

    def test_requests_of_all_speeds_at_once(self, roomy: Any, reference: Reference, prompts: Any) -> None:
        """All waiting at the start, sixteen at a time; then those of one speed, in which whole layers are skipped."""
        requests = requests_of(prompts, 48 // FEWER, seed=1)
        assert serve(roomy, requests).texts() == reference.texts(requests)
        check_layers(roomy)
        for speedup in SPEEDUPS:
            requests = [Request(prompt, speedup) for prompt in prompts[:: 4 * FEWER]]
            assert serve(roomy, requests).texts() == reference.texts(requests)

    def test_staggered_arrivals_and_aborts(self, roomy: Any, reference: Reference, prompts: Any) -> None:
        """Prompts come in while others write, and clients leave at any moment."""
        requests = requests_of(prompts, 96 // FEWER, seed=5)
        check_among_leavers(roomy, requests, reference.texts(requests), seed=4)

    def test_prefix_caching_of_shared_prompts_and_second_turns(
        self, roomy: Any, reference: Reference, prompts: Any
    ) -> None:
        """Prompts are shared by all speeds; what a fast request wrote is never another request's prompt."""
        chosen = [prompt for prompt in prompts if len(prompt) >= 32][:12]
        first = [Request(prompt, speedup) for prompt in chosen[::FEWER] for speedup in SPEEDUPS]
        texts = reference.texts(first)
        for _ in range(2):  # the second time from the cache
            served = serve(roomy, first)
            assert served.texts() == texts
        assert sum(served.cached.values()) > 0
        turns = [
            Request((*request.prompt, *text), speedup, 24)
            for request, text in zip(first, texts, strict=True)
            for speedup in (1.0, 5.0)
        ]
        assert serve(roomy, turns).texts() == reference.texts(turns)


class TestTight:
    """An engine with too few blocks and prompts in pieces: requests lose their keys, and are replayed."""

    @pytest.fixture(scope="class")
    def tight(self) -> Iterator[Any]:
        options: dict[str, Any] = {"max_num_batched_tokens": 24, "enable_chunked_prefill": True}
        with engine(num_gpu_blocks_override=19, disable_hybrid_kv_cache_manager=True, **options) as made:
            yield made

    def test_tiny_chunks_and_preemption(
        self, tight: Any, reference: Reference, prompts: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Replayed requests compute generated tokens again, at their old depths."""
        requests = requests_of(prompts, 96 // FEWER, seed=7)
        preempted = count_calls(scheduler(tight), "_preempt_request", monkeypatch)
        assert serve(tight, requests).texts() == reference.texts(requests)
        assert len(preempted) > len(requests) // 40

    @pytest.mark.skipif(V2, reason="runner V2 has no generator of a request's own")
    def test_a_seeds_text_does_not_depend_on_how_its_prompt_is_cut(self, tight: Any, prompts: Any) -> None:
        """Nor does the engine end over it, as vLLM's own would on a CPU."""
        requests = requests_of(prompts, 24, seed=8, most=12)
        sampling: dict[str, Any] = {"temperature": 1.0, "seed": 100}
        at_once = serve(tight, requests, **sampling)
        one_by_one = serve(tight, requests, arrive=lambda step: step % 3 // 2, **sampling)
        assert at_once.texts() == one_by_one.texts()


def test_prompts_of_their_own_depth(reference: Reference, prompts: list[tuple[int, ...]]) -> None:
    """With the cache on: prompts of other depths are told apart, equal ones are shared."""

    def with_prompts(schedule: Schedule) -> Schedule:
        return schedule.replace(prompt_layers=max(12, schedule.max_depth))

    requests = 2 * requests_of(prompts, 60 // FEWER, seed=8)
    with engine(skipdecode={"prompt_layers": 12}, enable_prefix_caching=True, max_num_batched_tokens=96) as made:
        served = serve(made, requests)
    assert served.texts() == reference.texts(requests, with_prompts)
    assert sum(served.cached.values()) > 0
