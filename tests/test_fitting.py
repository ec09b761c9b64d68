"""Fitting: the ratio asked for, in the form asked for, whatever the lengths."""

from __future__ import annotations

import itertools
import logging
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipdecode import Schedule, ScheduleError
from skipdecode.fitting import LONGEST, NEAR, TOLERANCE, achieved, fit, refit

FALLING = ["linear", "cosine", "exponential", "power", "step"]
LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(lambda lengths: sum(lengths) > 0)


def off(schedule: Schedule, speedup: float, lengths: list[int]) -> float:
    """How far the achieved ratio is from the one asked for."""
    return abs(achieved(schedule, lengths) / speedup - 1)


@st.composite
def wishes(draw: st.DrawFn) -> tuple[int, float, list[int], dict[str, object]]:
    """Layers, a speed-up, lengths, and a form."""
    layers = draw(st.integers(2, 10))
    form = {"decay": draw(st.sampled_from(FALLING)), "order": draw(st.sampled_from(["top", "bottom", "even"]))}
    return layers, draw(st.floats(1.05, layers)), draw(LENGTHS), form | {"prompt_decay": draw(st.integers(0, 5))}


@settings(max_examples=50, deadline=None)
@given(wishes())
def test_a_fall_is_kept_wherever_one_comes_near(wish: tuple[int, float, list[int], dict[str, object]]) -> None:
    """F3: a constant depth comes only where no fall is within NEAR and it is nearer; nothing ever increases."""
    layers, speedup, lengths, form = wish
    plan = fit(layers, speedup, lengths, **form)
    assert {name: getattr(plan, name) for name in form} == form
    depths = [plan.depth(g) for g in range(max(lengths) + 1)]
    assert all(a >= b for a, b in itertools.pairwise(depths))
    typical = max(sorted(lengths)[min(9 * len(lengths) // 10, len(lengths) - 1)], 1)
    falls = [
        off(Schedule(layers, most, low, horizon, **form), speedup, lengths)
        for most in range(1, layers + 1)
        for low in range(1, most)
        if abs((most + low) / 2 / (layers / speedup) - 1) <= 0.35 and most <= int(2 * layers / speedup) + 2
        for horizon in range(max(typical // 3, 2), 2 * typical + 1)
    ]
    flats = [off(Schedule(layers, depth, depth, 1, **form), speedup, lengths) for depth in range(1, layers + 1)]
    if plan.max_depth > plan.min_depth:
        assert off(plan, speedup, lengths) <= max(TOLERANCE, min(falls)) + 1e-9
        assert min(falls) <= max(NEAR, min(flats)) + 1e-9
    else:
        assert min(falls, default=9) > NEAR
        assert off(plan, speedup, lengths) == pytest.approx(min(flats))


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 32), st.floats(1.05, 32), LENGTHS)
def test_a_constant_depth_asked_for_is_the_nearest_one(layers: int, speedup: float, lengths: list[int]) -> None:
    """Of all depths, none comes nearer to the ratio."""
    speedup = min(speedup, layers)
    plan = fit(layers, speedup, lengths, decay="constant")
    assert (plan.max_depth, plan.horizon, plan.decay) == (plan.min_depth, 1, "constant")
    assert off(plan, speedup, lengths) == min(abs(layers / depth / speedup - 1) for depth in range(1, layers + 1))


@pytest.mark.parametrize("lengths", [[44, 39, 40, 36], [12], [30, 9, 55, 55, 21], [60] * 3, [25, 26, 27, 28, 29]])
def test_six_layers_at_3x_fall(lengths: list[int]) -> None:
    """F3: a constant two of six layers is 3x exactly, and is not what was asked for."""
    plan = fit(6, 3, lengths)
    assert plan.max_depth > plan.min_depth
    assert plan.horizon >= max(lengths) // 4
    assert off(plan, 3, lengths) <= TOLERANCE


def test_a_constant_depth_not_asked_for_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """One layer of four at every step is all that 4x can be."""
    with caplog.at_level(logging.WARNING):
        assert fit(4, 4, [20, 30]).max_depth == 1
        assert "constant depth of 1" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        fit(4, 4, [20, 30], decay="constant")
        fit(8, 2, [20, 30])
    assert not caplog.text


@settings(max_examples=50, deadline=None)
@given(wishes(), LENGTHS)
def test_refitting_moves_the_horizon_alone(
    wish: tuple[int, float, list[int], dict[str, object]], later: list[int]
) -> None:
    """F3: deepest, shallowest and form stay; None where no horizon comes within 1%, and then there is none."""
    layers, speedup, lengths, form = wish
    plan = fit(layers, speedup, lengths, **form)
    again = refit(plan, speedup, later)
    if again is None:
        for horizon in range(2, 4 * max(later)):
            moved = Schedule(layers, plan.max_depth, plan.min_depth, horizon, **form)
            assert plan.max_depth == plan.min_depth or off(moved, speedup, later) > TOLERANCE
    else:
        assert again.to_dict() | {"horizon": 0} == plan.to_dict() | {"horizon": 0}
        assert off(again, speedup, later) <= TOLERANCE
        assert again.horizon > 1 or again == plan


@settings(max_examples=50, deadline=None)
@given(wishes())
def test_achieved_is_what_the_steps_add_up_to(wish: tuple[int, float, list[int], dict[str, object]]) -> None:
    """Counted by level as counted step by step."""
    layers, speedup, lengths, form = wish
    plan = fit(layers, speedup, lengths, **form)
    ran = sum(plan.depth(g) for length in lengths for g in range(length))
    assert achieved(plan, lengths) == pytest.approx(layers * sum(lengths) / ran)
    listed = Schedule.from_depths(layers, [plan.depth(g) for g in range(max(lengths))])
    assert achieved(listed, lengths) == pytest.approx(achieved(plan, lengths))


def test_long_texts_and_many_of_them_are_fitted_at_once() -> None:
    """G: a length of a million steps, or a million lengths, are no reason to hang."""
    start = time.process_time()
    for lengths in ([LONGEST, 400_000, 3], [*range(1, 200_001)], [40] * 10**6):
        for decay in ("linear", "cosine"):
            assert off(fit(32, 3, lengths, decay=decay), 3, lengths) <= TOLERANCE
    assert time.process_time() - start < 20


@pytest.mark.parametrize("lengths", [[], [0, 0], [-3], [2.5], ["40"], [True]])
def test_lengths_that_are_none_are_refused(lengths: list[object]) -> None:
    """G: an error of ours with one line, and no hang."""
    with pytest.raises(ScheduleError, match="decode step"):
        fit(8, 2, lengths)  # wrong on purpose: what JSON or a command line may bring
