"""New requests let in by groups, deep rows that leave steps out: tokens stay those of each request alone.

float32, greedy, eager; the embedded checkpoint. ``make test-vllm`` runs these in an environment of their own.
"""

from __future__ import annotations

import logging
import math
import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm.v1.request import RequestStatus

from helpers.engine import Reference, Request, engine, runner, scheduler, serve
from skipdecode.data.inputs import read_items
from skipdecode.data.tasks import get_task
from skipdecode.serving import scheduler as module
from skipdecode.serving.scheduler import SkipScheduler
from skipdecode.serving.step_costs import StepCosts
from skipdecode.weights.loading import DEMO as DEMO_FOLDER

SPEEDUPS = (1.0, 2.0, 3.0, 5.0)
LAYERS = 24
INPUTS = str(DEMO_FOLDER / "inputs.csv")


@pytest.fixture(scope="module")
def reference() -> Reference:
    """What our own ``generate`` writes."""
    return Reference("demo")


@pytest.fixture(scope="module")
def inputs(reference: Reference) -> list[tuple[int, ...]]:
    """Prompts to which the checkpoint writes long texts."""
    return [tuple(reference.tokenizer(str(i.prompt))["input_ids"]) for i in read_items(INPUTS, get_task("e2e"))]


def requests_of(inputs: list[tuple[int, ...]], count: int, seed: int) -> list[Request]:
    """Random requests of four speeds; every prompt comes several times."""
    source = random.Random(seed)
    pool = [tuple(source.choices(range(3, 1000), k=source.randint(1, 90))) for _ in range(24)] + inputs[:24]
    return [Request(source.choice(pool), source.choice(SPEEDUPS), source.randint(8, 64)) for _ in range(count)]


def options(**given: Any) -> dict[str, Any]:
    """Of the plugin."""
    return {"additional_config": {"skipdecode": given}}


class Clock:
    """Seconds as a machine has them on which weights bind: a step takes the layers that any of its tokens runs."""

    def __init__(self, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.steps = 0.0, 0
        #: Of each request, when it got its tokens, the first one without.
        self.tokens: dict[str, list[float]] = {}
        self.prompts = 0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        plan, its = runner(made).skip_plan, scheduler(made)
        begin, update = plan.begin, its.update_from_output

        def counted(step: Any, narrowed: Any) -> None:
            self.now += sum(count > 0 for count in step.counts)
            self.steps += 1
            self.prompts += step.tokens > len(step.starts) - 1
            begin(step, narrowed)

        def updated(output: Any, *args: Any) -> Any:
            for name in output.num_scheduled_tokens:
                self.tokens.setdefault(name, []).append(self.now)
            return update(output, *args)

        monkeypatch.setattr(plan, "begin", counted)
        monkeypatch.setattr(its, "update_from_output", updated)


def test_groups_come_in_fewer_steps(
    reference: Reference, inputs: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where layers are what a step costs, measuring them finds that groups pay; the whole run takes less time."""
    source = random.Random(1)
    requests = [Request(source.choice(inputs), 5.0, source.randint(16, 64)) for _ in range(200)]
    clocks: dict[Any, Clock] = {}
    for together in (1, 3, "auto"):
        with engine(DEMO_FOLDER, max_num_seqs=8, **options(admit_together=together)) as made:
            its = scheduler(made)
            assert isinstance(its, SkipScheduler) == (together != 1)
            if together != 1:
                its.admission.max_wait = 1e9  # of the clock's seconds
            clocks[together] = Clock(made, monkeypatch)
            served = serve(made, requests)
            monkeypatch.undo()
        assert [served.tokens[i] for i in range(len(requests))] == reference.texts(requests)
        if together != 1:
            assert its.admission.together > 1
            assert its.admission.held_steps > 0
            assert clocks[together].prompts < 0.7 * clocks[1].prompts
            assert clocks[together].now < 0.95 * clocks[1].now
    assert its.costs.prompts.sure == pytest.approx(LAYERS - 5, abs=2)
    assert its.costs.steps == pytest.approx(sum(map(len, served.tokens.values())) / len(requests), rel=0.3)


def test_the_group_changes_while_requests_run(
    reference: Reference, inputs: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever costs say, also by noise, tokens stay; each change is logged with them."""
    requests = requests_of(inputs, 200, seed=2)
    source, seen = random.Random(3), []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: seen.append(record.getMessage()))
    monkeypatch.setattr(module, "EVERY", 4)
    monkeypatch.setattr(StepCosts, "group", lambda *_: source.choice((1, 3, 8, 16)))
    with engine(DEMO_FOLDER, **options(max_wait=0.05)) as made:
        its = scheduler(made)
        level = module.logger.level
        module.logger.setLevel(logging.INFO)
        module.logger.addHandler(handler)
        found, since, longest = its.admission.holds, math.inf, 0.0

        def holds(free: int, waiting: int, now: float) -> bool:
            nonlocal since, longest
            held: bool = found(free, waiting, now)
            since = min(since, now) if held else math.inf
            longest = max(longest, now - since)
            return held

        monkeypatch.setattr(its.admission, "holds", holds)
        served = serve(made, requests, arrive=lambda step: source.choice((0, 1, 2, 3)))
    module.logger.removeHandler(handler)
    module.logger.setLevel(level)
    assert [served.tokens[i] for i in range(len(requests))] == reference.texts(requests)
    assert its.admission.held_steps > 0
    assert longest < 0.05
    assert len(seen) > 2
    assert "let in by groups of" in seen[0]
    assert "a decode step takes" in seen[0]


def test_shallow_rows_do_not_wait_for_deep_ones(
    reference: Reference, inputs: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 5x get tokens while those of 1x sit out, and these take at most twice as long, and a step."""
    requests = [Request(prompt, speedup, 64) for prompt in inputs[:6] for speedup in (1.0, 5.0)]
    mean: dict[float, dict[float, float]] = {}
    for slowdown in (1.0, 2.0):
        with engine(DEMO_FOLDER, **options(admit_together=1, max_slowdown=slowdown)) as made:
            clock = Clock(made, monkeypatch)
            served = serve(made, requests)
            monkeypatch.undo()
            partial = getattr(scheduler(made), "partial_steps", 0)
        assert (partial > 0) == (slowdown > 1)
        assert [served.tokens[i] for i in range(len(requests))] == reference.texts(requests)
        gaps: dict[float, list[float]] = {1.0: [], 5.0: []}
        for name, times in clock.tokens.items():
            request = requests[int(name.split(":")[1].split("-")[0])]
            its = [after - before for before, after in pairwise(times)]
            assert max(its, default=0) <= slowdown * LAYERS + 6
            gaps[request.speedup] += its
        mean[slowdown] = {speedup: sum(each) / len(each) for speedup, each in gaps.items()}
    assert mean[2.0][5.0] < 0.6 * mean[1.0][5.0]
    assert mean[2.0][1.0] < 2.3 * mean[1.0][1.0]


@pytest.mark.parametrize("caching", [False, True])
def test_turns_with_arrivals_and_aborts(
    reference: Reference, inputs: list[tuple[int, ...]], caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of four speeds come and go; no block is lost."""
    source = random.Random(5)
    requests = requests_of(inputs, 256, seed=6)
    given = options(max_slowdown=3, admit_together=3)
    with engine(DEMO_FOLDER, enable_prefix_caching=caching, **given) as made:
        Clock(made, monkeypatch)
        served = serve(
            made,
            requests,
            arrive=lambda step: source.choice((0, 0, 1, 1, 2)),
            abort=lambda place, step: source.random() < 0.003,
        )
        its = scheduler(made)
        pool = its.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # vLLM's null block
    assert its.partial_steps > 50
    expected = reference.texts(requests)
    finished = [i for i in range(len(requests)) if served.tokens[i]]
    assert 60 < len(finished) < len(requests)
    assert [served.tokens[i] for i in finished] == [expected[i] for i in finished]


@pytest.mark.parametrize("budget", [64, 2048])
@pytest.mark.parametrize(("free", "blocks"), [(False, 22), (True, 8 * 10)])  # eight buckets of three layers
def test_turns_under_forced_preemption(
    reference: Reference,
    inputs: list[tuple[int, ...]],
    budget: int,
    free: bool,
    blocks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Too few blocks, prompts in pieces: nobody is preempted by a step that did not see all rows."""
    requests = requests_of(inputs, 200, seed=7)
    with engine(
        DEMO_FOLDER,
        num_gpu_blocks_override=blocks,
        max_num_batched_tokens=budget,
        enable_chunked_prefill=True,
        **options(max_slowdown=3, free_blocks=free),
    ) as made:
        its, preempted = scheduler(made), []
        Clock(made, monkeypatch)
        found = its._preempt_request

        def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
            preempted.append(request)
            begun = [each for each in its.requests.values() if each.status == RequestStatus.RUNNING]
            assert len(its.running) + 1 == len(begun)  # it, and all others
            return found(request, *args, **kwargs)

        monkeypatch.setattr(its, "_preempt_request", counted)
        served = serve(made, requests)
        assert its.partial_steps > 5
        assert len(preempted) >= 5
        pool = its.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert [served.tokens[i] for i in range(len(requests))] == reference.texts(requests)


def test_log_probabilities_stay_with_turns(inputs: list[tuple[int, ...]]) -> None:
    """Rows that leave the worker's batch and come back keep what is sampled from."""
    requests = requests_of(inputs, 16, seed=8)
    served = {}
    for slowdown in (1, 4):
        with engine(DEMO_FOLDER, **options(admit_together=1, max_slowdown=slowdown)) as made:
            served[slowdown] = serve(made, requests, logprobs=0)
    assert served[4].tokens == served[1].tokens
    for place, values in served[4].logprobs.items():
        assert values == pytest.approx(served[1].logprobs[place], abs=1e-4)
