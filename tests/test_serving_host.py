"""What a step of a server costs before its layers run: plans and their tables."""

from __future__ import annotations

import numpy as np
import pytest

from skipdecode import Schedule
from skipdecode.serving.steps import Step, Tables

LAYERS = 24
SCHEDULES = {
    1.0: Schedule.full(LAYERS),
    2.0: Schedule(LAYERS, 20, 6, horizon=40),
    3.0: Schedule(LAYERS, 20, 4, horizon=9, prompt_decay=3),
    5.0: Schedule.for_speedup(5, LAYERS, 64, decay="constant", prompt_layers="max"),
}


def step_of(*requests: tuple[float, int, int, int]) -> Step:
    """The step of requests (speed-up, prompt length, tokens before, tokens in the step)."""
    tables = Tables(SCHEDULES)
    speedups, prompts, computed, counts = zip(*requests, strict=True)
    arrays = [np.array(values, dtype=np.int64) for values in (counts, computed, prompts)]
    return tables.step([tables.of(speedup) for speedup in speedups], *arrays)


@pytest.mark.parametrize(
    ("requests", "full"),
    [
        ([(1.0, 5, 90, 1)] * 32, True),
        ([(2.0, 50, 0, 50), (1.0, 5, 90, 1)], True),  # the whole prompt, and not yet a step
        ([(2.0, 50, 0, 51)], False),
        ([(2.0, 50, 49, 1)], True),
        ([(2.0, 50, 50, 1)], False),
        ([(3.0, 9, 0, 6)], True),  # before the prompt's last three
        ([(3.0, 9, 0, 9)], False),
        ([(5.0, 9, 0, 1)], False),  # prompts of their own depth
        ([(1.0, 5, 90, 1), (5.0, 9, 20, 1)], False),
    ],
)
def test_a_full_step_is_known_by_its_requests_alone(requests: list[tuple[float, int, int, int]], full: bool) -> None:
    """Nothing is looked up for its tokens: one value stands for all of them."""
    step = step_of(*requests)
    assert step.is_full == full == bool(step.runs.all())
    assert (step.runs.strides == (0, 0)) == full
    assert step.counts == step.runs.sum(axis=0).tolist()


def test_a_constant_depth_is_two_rows() -> None:
    """Prompts and steps, however long the horizon."""
    assert len(Tables({3.0: Schedule.for_speedup(3, LAYERS, 4096, decay="constant")}).of(3.0).runs) == 2
