"""Fitting: the ratio that was asked for, in the form that was asked for, whatever the lengths."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipdecode.errors import ScheduleError
from skipdecode.schedule import Schedule, share_of_max
from skipdecode.training.fitting import TOLERANCE, batch_lengths, fit, layer_ratio

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)
#: Decode steps of batches of E2E.
E2E = [44, 44, 38, 39, 40, 39, 40, 36, 36, 35, 34, 35, 32, 32, 31, 25, 22, 14]


def ran(schedule: Schedule, lengths: list[int]) -> float:
    """The ratio, counted step by step."""
    layers = sum(schedule.depth(step) for length in lengths for step in range(length))
    return schedule.num_layers * sum(lengths) / layers


@given(LENGTHS, st.integers(2, 32), st.integers(1, 32), st.integers(1, 60))
def test_layers_are_counted_as_batches_run_them(lengths: list[int], most: int, least: int, horizon: int) -> None:
    schedule = Schedule(32, max(most, least), min(most, least), horizon)
    assert layer_ratio(schedule, lengths) == pytest.approx(ran(schedule, lengths))


@pytest.mark.parametrize("layers", [24, 32])
@pytest.mark.parametrize("speedup", [1.5, 2, 3, 4, 5])
@pytest.mark.parametrize("style", [{}, {"decay": "cosine"}, {"order": "even"}, {"prompt_layers": "max"}], ids=str)
def test_real_lengths_are_met_by_depths_like_the_papers(layers: int, speedup: float, style: dict[str, Any]) -> None:
    schedule = fit(layers, speedup, E2E, **style)
    assert ran(schedule, E2E) == pytest.approx(speedup, rel=TOLERANCE)
    share = schedule.max_depth / (schedule.max_depth + schedule.min_depth)
    assert share == pytest.approx(share_of_max(speedup), abs=0.1)
    assert schedule.order == style.get("order", "top")
    assert schedule.decay == style.get("decay", "linear")
    assert schedule.deepest == (schedule.max_depth if "prompt_layers" in style else layers)


@settings(max_examples=50)
@given(st.integers(3, 10), st.floats(1.05, 10), LENGTHS, st.sampled_from(["linear", "cosine", "step"]))
def test_no_other_fall_comes_nearer(layers: int, speedup: float, lengths: list[int], decay: str) -> None:
    """Within 1%, or as near as any depths and any horizon in the range."""
    typical = sorted(lengths)[9 * len(lengths) // 10]
    horizons = range(max(typical // 3, 2), max(2 * typical, 2) + 1)
    errors = [
        abs(ran(Schedule(layers, most, low, horizon, decay), lengths) / speedup - 1)
        for most in range(1, layers + 1)
        for low in range(1, most)
        for horizon in horizons
    ]
    try:
        schedule = fit(layers, speedup, lengths, decay=decay)
    except ScheduleError:
        assert not 1 < speedup < layers
        return
    assert schedule.min_depth < schedule.max_depth
    assert abs(ran(schedule, lengths) / speedup - 1) <= max(TOLERANCE, min(errors)) + 1e-9


def test_what_no_fall_reaches_is_refused() -> None:
    assert fit(8, 1, [20]) == Schedule.full(8)
    for speedup, style in ((0.5, {}), (8.5, {}), (2, {"warmup": 8})):
        with pytest.raises(ScheduleError, match="take decay constant"):
            fit(8, speedup, [20], **style)


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 5))
def test_a_batch_steps_until_its_longest_text_ends(tokens: list[int], size: int) -> None:
    """The first token is the prompt's, and no batch is without a step."""
    steps = []
    for number, length in enumerate(tokens):
        if number % size == 0:
            steps.append(1)
        steps[-1] = max(steps[-1], length - 1)
    assert batch_lengths(tokens, size) == steps
