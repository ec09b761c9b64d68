"""Compiled, as vLLM runs by default: full steps from the graph, steps that skip without it.

A gate inside a compiled graph freezes as it was when it was traced, open, and nothing says so: texts do.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from helpers.engine import Reference, Request, check_among_leavers, engine, runner, serve
from skipdecode.serving.gate import Gate
from skipdecode.weights.loading import DEMO

SPEEDUPS = (1.0, 2.0, 3.0, 5.0)


@pytest.fixture(scope="module")
def compiled() -> Iterator[Any]:
    """An engine that has compiled the model, and cuts long prompts into pieces."""
    with engine(DEMO, enforce_eager=False, max_num_batched_tokens=128, enable_chunked_prefill=True) as made:
        yield made


def requests_of(reference: Reference, count: int, speedups: tuple[float, ...], new: int) -> list[Request]:
    """Random requests for inputs of the checkpoint."""
    source = random.Random(0)
    lines = (DEMO / "inputs.csv").read_text(encoding="utf-8").splitlines()[1:]
    prompts = [tuple(reference.tokenizer(f"{line.strip(chr(34))} ->")["input_ids"]) for line in lines[:30]]
    return [Request(source.choice(prompts), source.choice(speedups), new) for _ in range(count)]


def test_texts_are_those_of_generate(compiled: Any) -> None:
    """At full depth and below it, in steps of both."""
    reference = Reference("demo")
    requests = requests_of(reference, 48, SPEEDUPS, 40)
    served = serve(compiled, requests, arrive=lambda step: 1 + step % 2)
    wrong = [i for i, text in enumerate(reference.texts(requests)) if served.tokens[i] != text]
    assert not wrong
    plan = runner(compiled).skip_plan
    assert plan.run_tokens == plan.needed_tokens < plan.full_tokens  # the graph itself counts nothing


def test_long_prompts_in_pieces_among_clients_that_leave(compiled: Any) -> None:
    """Requests of all speeds come and go at any step: the others' texts stay, and no block is lost."""
    reference, source = Reference("demo", most_new=40), random.Random(1)
    requests = requests_of(reference, 64, SPEEDUPS, 40)
    for place in range(0, 64, 3):
        prompt = tuple(source.choices(range(3, 1000), k=source.randint(100, 200)))
        requests[place] = Request(prompt, source.choice(SPEEDUPS), source.randint(1, 40))
    check_among_leavers(compiled, requests, reference, source)


def test_steps_that_skip_run_the_layers_of_their_plan_alone(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted inside the layers, not by the gates: full steps go through the graph, which calls none of these hooks."""
    plan = runner(compiled).skip_plan
    layers = [part for part in runner(compiled).model.modules() if isinstance(part.forward, Gate)]
    called, expected = [0], [0]
    following = plan.following

    def counted(step: Any, narrowed: Any) -> Any:
        expected[0] += 0 if step.is_full else sum(count > 0 for count in step.counts)
        return following(step, narrowed)

    def entered(*_: Any) -> None:
        called[0] += 1

    monkeypatch.setattr(plan, "following", counted)
    hooks = [next(layer.children()).register_forward_hook(entered) for layer in layers]
    steps = plan.steps
    serve(compiled, requests_of(Reference("demo"), 8, (5.0,), 24))
    for hook in hooks:
        hook.remove()
    assert called == expected
    assert 0 < called[0] < len(layers) * (plan.steps - steps) / 3
