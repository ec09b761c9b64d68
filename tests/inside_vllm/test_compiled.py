"""Compiled, as vLLM runs by default: full steps from the graph, steps that skip without it.

A gate inside a compiled graph freezes as it was when it was traced, open, and nothing says so: texts and times do.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from helpers.engine import Reference, Request, engine, runner, serve
from skipdecode.weights.loading import DEMO

SPEEDUPS = (1.0, 2.0, 3.0, 5.0)


@pytest.fixture(scope="module")
def compiled() -> Iterator[Any]:
    """An engine that has compiled the model."""
    with engine(DEMO, enforce_eager=False) as made:
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


def test_a_step_takes_less_where_it_runs_fewer_layers(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock, not a counter: a fifth of the layers takes less than two thirds of the time of all."""
    reference = Reference("demo")
    seconds: list[float] = []
    found = runner(compiled).model.forward

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        output = found(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
        return output

    monkeypatch.setattr(runner(compiled).model, "forward", timed)
    medians: dict[float, list[float]] = {1.0: [], 5.0: []}
    for _ in range(5):
        for speedup, found_medians in medians.items():
            seconds.clear()
            serve(compiled, requests_of(reference, 8, (speedup,), 24))
            found_medians.append(statistics.median(seconds[4:]))
    assert min(medians[5.0]) < 0.67 * min(medians[1.0])
