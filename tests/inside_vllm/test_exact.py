"""Inside vLLM every request gets the tokens that our own ``generate`` writes for it alone, whatever shares its steps.

float32, greedy, eager; the embedded checkpoint. ``make test-vllm`` runs these in an environment of their own, and
``make test-vllm-v2`` runs them with model runner V2, with fewer requests, since its kernels are interpreted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from helpers.engine import Reference, Request, check_among_leavers, engine, runner, scheduler, serve
from helpers.interpreted import V2
from skipdecode import Schedule
from skipdecode.loading.load import DEMO as DEMO_FOLDER

SPEEDUPS = (1.0, 2.0, 3.0, 5.0)
#: Of the requests, one in so many is made.
FEWER = 6 if V2 else 1


@pytest.fixture(scope="module")
def reference() -> Reference:
    """What our own ``generate`` writes."""
    return Reference("demo")


@pytest.fixture(scope="module")
def prompts(reference: Reference) -> list[tuple[int, ...]]:
    """Inputs as the checkpoint knows them, cut and put together, and ids at random."""
    source = random.Random(0)
    lines = (DEMO_FOLDER / "inputs.csv").read_text(encoding="utf-8").splitlines()[1:]
    texts = [line.split('"')[1] if line.startswith('"') else line for line in lines]
    rows = [tuple(reference.tokenizer(f"{text} ->")["input_ids"]) for text in texts[:40]]
    rows += [tuple(source.choices(range(3, 1000), k=source.randint(1, 90))) for _ in range(24)]
    return rows


def requests_of(prompts: list[tuple[int, ...]], count: int, seed: int, most: int = 64) -> list[Request]:
    """Random requests."""
    source = random.Random(seed)
    made = range(count // FEWER)
    return [Request(source.choice(prompts), source.choice(SPEEDUPS), source.randint(1, most)) for _ in made]


@pytest.fixture(scope="module")
def roomy() -> Iterator[Any]:
    """An engine with room for everything."""
    with engine(DEMO_FOLDER) as made:
        yield made


def test_requests_of_all_speeds_at_once(roomy: Any, reference: Reference, prompts: list[tuple[int, ...]]) -> None:
    """All waiting at the start, sixteen at a time."""
    requests = requests_of(prompts, 128, seed=1)
    served = serve(roomy, requests)
    assert [served.tokens[i] for i in range(len(requests))] == reference.texts(requests)
    plan = runner(roomy).skip_context
    assert plan.needed_tokens == plan.run_tokens < plan.full_tokens


@pytest.mark.parametrize("speedup", SPEEDUPS)
def test_requests_of_one_speed(
    roomy: Any, reference: Reference, prompts: list[tuple[int, ...]], speedup: float
) -> None:
    """Steps in which whole layers are skipped."""
    requests = [Request(prompt, speedup) for prompt in prompts[:: 2 * FEWER]]
    served = serve(roomy, requests)
    assert [served.tokens[i] for i in range(len(requests))] == reference.texts(requests)


def test_staggered_arrivals(roomy: Any, reference: Reference, prompts: list[tuple[int, ...]]) -> None:
    """Prompts come in while others write: steps of both."""
    source = random.Random(2)
    requests = requests_of(prompts, 128, seed=3)
    served = serve(roomy, requests, arrive=lambda step: source.choice((0, 0, 1, 1, 2)))
    assert [served.tokens[i] for i in range(len(requests))] == reference.texts(requests)


def test_aborts(roomy: Any, reference: Reference, prompts: list[tuple[int, ...]]) -> None:
    """Clients leave at any moment: what the others get does not change, and no block is lost."""
    check_among_leavers(roomy, requests_of(prompts, 256, seed=5), reference, random.Random(4))


@pytest.mark.parametrize("budget", [24, 64])
def test_tiny_chunks(reference: Reference, prompts: list[tuple[int, ...]], budget: int) -> None:
    """Prompts in pieces, in steps of few tokens."""
    requests = requests_of(prompts, 100, seed=6)
    with engine(DEMO_FOLDER, max_num_batched_tokens=budget, enable_chunked_prefill=True) as made:
        served = serve(made, requests)
    assert [served.tokens[i] for i in range(len(requests))] == reference.texts(requests)


@pytest.mark.skipif(V2, reason="runner V2 has no generator of a request's own")
def test_a_seeds_text_does_not_depend_on_how_its_prompt_is_cut(prompts: list[tuple[int, ...]]) -> None:
    """Nor does the engine end over it, as vLLM's own would on a CPU."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    texts = []
    for budget in (2048, 24):
        with engine(DEMO_FOLDER, max_num_batched_tokens=budget, enable_chunked_prefill=True) as made:
            for place, prompt in enumerate(prompts[:32]):
                speedup = SPEEDUPS[place % 4]
                params = SamplingParams(seed=place, max_tokens=12, extra_args={"speedup": speedup})
                made.add_request(str(place), TokensPrompt(prompt_token_ids=list(prompt)), params)
            found: dict[str, Any] = {}
            while made.has_unfinished_requests():
                found |= {o.request_id: o.outputs[0].token_ids for o in made.step() if o.finished}
        texts.append(found)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("caching", "budget", "free"), [(False, 64, True), (True, 2048, True), (False, 2048, False), (True, 64, False)]
)
def test_forced_preemption(
    reference: Reference,
    prompts: list[tuple[int, ...]],
    caching: bool,
    budget: int,
    free: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Too few blocks: requests lose their keys and are replayed, generated tokens at their old depths."""
    requests = requests_of(prompts, 120, seed=7)
    with engine(
        DEMO_FOLDER,
        num_gpu_blocks_override=8 * 11 if free else 22,  # eight buckets of three layers
        disable_hybrid_kv_cache_manager=not free,
        enable_prefix_caching=caching,
        max_num_batched_tokens=budget,
        enable_chunked_prefill=True,
    ) as made:
        preempted = []
        found = scheduler(made)._preempt_request

        def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
            preempted.append(request)
            return found(request, *args, **kwargs)

        monkeypatch.setattr(scheduler(made), "_preempt_request", counted)
        served = serve(made, requests)
    assert len(preempted) > len(requests) // 40
    assert [served.tokens[i] for i in range(len(requests))] == reference.texts(requests)


def test_prefix_caching_of_shared_prompts_and_second_turns(
    reference: Reference, prompts: list[tuple[int, ...]]
) -> None:
    """Prompts are shared by all speeds; what a fast request wrote is never another request's prompt."""
    chosen = [prompt for prompt in prompts if len(prompt) >= 32][:12] + prompts[:4]
    first = [Request(prompt, speedup) for prompt in chosen[::FEWER] for speedup in SPEEDUPS]
    with engine(DEMO_FOLDER, enable_prefix_caching=True) as made:
        for _ in range(2):  # the second time from the cache
            served = serve(made, first)
            assert [served.tokens[i] for i in range(len(first))] == reference.texts(first)
        assert sum(served.cached.values()) > 0
        written = reference.texts(first)
        turns = [
            Request((*r.prompt, *text), speedup, 24)
            for r, text in zip(first, written, strict=True)
            for speedup in (1.0, 5.0)
            if len(r.prompt) + len(text) < 200
        ]
        served = serve(made, turns)
    assert [served.tokens[i] for i in range(len(turns))] == reference.texts(turns)


@pytest.mark.parametrize("layers", ["max", 12])
def test_prompts_of_their_own_depth(reference: Reference, prompts: list[tuple[int, ...]], layers: Any) -> None:
    """With the cache on: prompts of other depths are told apart, equal ones are shared."""

    def with_prompts(schedule: Schedule) -> Schedule:
        return schedule.replace(prompt_layers=layers if layers == "max" else max(layers, schedule.max_depth))

    requests = [*requests_of(prompts, 100, seed=8), *requests_of(prompts, 40, seed=8)]
    options = {"skipdecode": {"prompt_layers": layers}}
    with engine(DEMO_FOLDER, enable_prefix_caching=True, additional_config=options, max_num_batched_tokens=96) as made:
        served = serve(made, requests)
    assert [served.tokens[i] for i in range(len(requests))] == reference.texts(requests, with_prompts)
    assert sum(served.cached.values()) > 0
