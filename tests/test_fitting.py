"""Fitting: the ratio asked for, in the form asked for, whatever the lengths."""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from skipdecode.latency.fitting import LONGEST, Lengths, batch_lengths, bisect_ratio, fit, refit

from skipdecode import Schedule, ScheduleError
from skipdecode.schedule import share_of_max

TOLERANCE, NEAR = 0.01, 0.05  # what the docs promise
FALLING = ["linear", "cosine", "exponential", "power", "step"]
LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(lambda lengths: sum(lengths) > 0)


def off(schedule: Schedule, speedup: float, lengths: list[int]) -> float:
    """How far the achieved ratio is from the one asked for."""
    return abs(Lengths(lengths).ratio(schedule) / speedup - 1)


@st.composite
def wishes(draw: st.DrawFn) -> tuple[int, float, list[int], dict[str, Any]]:
    """Layers, a speed-up, lengths, and a form."""
    layers = draw(st.integers(2, 10))
    style = {"decay": draw(st.sampled_from(FALLING)), "order": draw(st.sampled_from(["top", "bottom", "even"]))}
    return layers, draw(st.floats(1.05, layers)), draw(LENGTHS), style | {"prompt_decay": draw(st.integers(0, 5))}


@settings(max_examples=50)
@given(wishes())
def test_a_fall_is_kept_wherever_one_comes_near(wish: tuple[int, float, list[int], dict[str, Any]]) -> None:
    """F3: a constant depth comes only where no fall is within NEAR and it is nearer; nothing ever increases."""
    layers, speedup, lengths, style = wish
    plan = fit(layers, speedup, lengths, **style)
    assert {name: getattr(plan, name) for name in style} == style
    depths = [plan.depth(g) for g in range(max(lengths) + 1)]
    assert all(a >= b for a, b in itertools.pairwise(depths))
    typical = max(sorted(lengths)[min(9 * len(lengths) // 10, len(lengths) - 1)], 1)
    falls = [
        off(Schedule(layers, most, low, horizon, **style), speedup, lengths)
        for most in range(1, layers + 1)
        for low in range(1, most)
        for horizon in range(max(typical // 3, 2), 2 * typical + 1)
    ]
    flats = [off(Schedule(layers, depth, depth, 1, **style), speedup, lengths) for depth in range(1, layers + 1)]
    if plan.max_depth > plan.min_depth:
        assert off(plan, speedup, lengths) <= max(TOLERANCE, min(falls)) + 1e-9
        assert min(falls) <= max(NEAR, min(flats)) + 1e-9
    else:
        assert min(falls, default=9) > NEAR
        assert off(plan, speedup, lengths) == pytest.approx(min(flats))


@settings(max_examples=50)
@given(st.integers(2, 32), st.floats(1.05, 32), LENGTHS)
def test_a_constant_depth_asked_for_is_the_nearest_one(layers: int, speedup: float, lengths: list[int]) -> None:
    """Of all depths, none comes nearer to the ratio."""
    speedup = min(speedup, layers)
    plan = fit(layers, speedup, lengths, decay="constant")
    assert (plan.max_depth, plan.horizon, plan.decay) == (plan.min_depth, 1, "constant")
    assert off(plan, speedup, lengths) == min(abs(layers / depth / speedup - 1) for depth in range(1, layers + 1))


@settings(max_examples=50)
@given(st.integers(24, 80), st.floats(1.5, 5), st.integers(30, 200), st.sampled_from(FALLING[:2]))
def test_of_many_falls_that_achieve_it_the_papers_is_taken(
    layers: int, speedup: float, length: int, decay: str
) -> None:
    """Its share of max in max + min, over about as many steps as texts have."""
    plan = fit(layers, speedup, [length], decay=decay)
    assert off(plan, speedup, [length]) <= TOLERANCE
    assert plan.max_depth / (plan.max_depth + plan.min_depth) == pytest.approx(share_of_max(speedup), abs=0.1)
    assert plan.horizon == pytest.approx(length, rel=0.25)


def test_a_constant_depth_that_is_nearer_takes_the_place_of_a_fall_that_is_far() -> None:
    """One step cannot fall: two layers of ten where 1.25 are asked for are farther off than one."""
    assert fit(10, 8, [1]).max_depth == 1
    assert fit(10, 8, [1], decay="constant").max_depth == 1


@settings(max_examples=50)
@given(st.integers(2, 32), st.floats(1, 32), LENGTHS, st.integers(1, 32))
def test_no_step_runs_more_layers_than_the_prompt(
    layers: int, speedup: float, lengths: list[int], prompt_layers: int
) -> None:
    """A number bounds the depths that are fitted; ``max`` follows them."""
    speedup, deepest = min(speedup, layers), min(prompt_layers, layers)
    schedule = fit(layers, speedup, lengths, prompt_layers=deepest)
    assert schedule.max_depth <= deepest or schedule.is_full
    follows = fit(layers, speedup, lengths, prompt_layers="max")
    assert follows.deepest == follows.max_depth
    assert follows.replace(prompt_layers=None) == fit(layers, speedup, lengths)


@settings(max_examples=50)
@given(st.integers(2, 32), st.floats(1, 32), LENGTHS)
def test_bisection_finds_the_nearest(layers: int, speedup: float, lengths: list[int]) -> None:
    """Of all that ``at`` can give, where the ratio grows with its argument."""
    speedup = min(speedup, layers)

    def at(x: float) -> Schedule:
        depth = min(max(round(x), 1), layers)
        return Schedule(layers, depth, depth, 1)

    found = bisect_ratio(lambda x: at(-x), -layers - 3, 0, speedup, lengths)
    assert off(found, speedup, lengths) == min(off(at(depth), speedup, lengths) for depth in range(1, layers + 1))


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


@settings(max_examples=50)
@given(wishes(), LENGTHS)
def test_refitting_moves_the_horizon_alone(
    wish: tuple[int, float, list[int], dict[str, Any]], later: list[int]
) -> None:
    """F3: deepest, shallowest and form stay; None where no horizon comes within 1%, and then there is none."""
    layers, speedup, lengths, style = wish
    plan = fit(layers, speedup, lengths, **style)
    again = refit(plan, speedup, later)
    falling = plan.max_depth > plan.min_depth
    moves = [plan.replace(horizon=horizon) for horizon in range(2, 4 * max(later) + 3)] if falling else []
    errors = [off(moved, speedup, later) for moved in moves]
    if again is None:
        assert min(errors, default=math.inf) > TOLERANCE
        assert off(plan, speedup, later) > TOLERANCE
    elif again == plan:
        assert off(plan, speedup, later) <= TOLERANCE
    else:
        assert again in moves
        assert off(again, speedup, later) == min(errors) <= TOLERANCE < off(plan, speedup, later)


@pytest.mark.parametrize("plan", [Schedule(8, 4, 4, 1), Schedule.from_depths(8, [6, 4, 2])])
def test_what_has_no_horizon_to_move_is_kept_or_given_up(plan: Schedule) -> None:
    """A constant depth and a list are right as they are, or not at all."""
    assert refit(plan, Lengths([3, 2]).ratio(plan), [3, 2]) is plan
    assert refit(plan, 1.1 * Lengths([3, 2]).ratio(plan), [3, 2]) is None


@settings(max_examples=50)
@given(wishes())
def test_achieved_is_what_the_steps_add_up_to(wish: tuple[int, float, list[int], dict[str, Any]]) -> None:
    """Counted by level as counted step by step."""
    layers, speedup, lengths, style = wish
    plan = fit(layers, speedup, lengths, **style)
    ran = sum(plan.depth(g) for length in lengths for g in range(length))
    assert Lengths(lengths).ratio(plan) == pytest.approx(layers * sum(lengths) / ran)
    listed = Schedule.from_depths(layers, [plan.depth(g) for g in range(max(lengths))])
    assert Lengths(lengths).ratio(listed) == pytest.approx(Lengths(lengths).ratio(plan))


@given(LENGTHS)
@example([1])
@example([0] * 10 + [7])
def test_the_typical_length_is_the_90th_percentile(lengths: list[int]) -> None:
    """Of all batches, at most nine tenths are shorter, and more than nine tenths not longer; never below one step."""
    typical = Lengths(lengths).typical
    assert 10 * sum(n < typical for n in lengths) <= 9 * len(lengths) or typical == 1
    assert 10 * sum(n <= typical for n in lengths) > 9 * len(lengths)
    assert typical == 1 or (typical > 1 and typical in lengths)


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 5))
def test_a_batch_steps_until_its_longest_row_ends(tokens: list[int], size: int) -> None:
    """In order, the last batch what is left; the first token is the prompt's, and no batch is without a step."""
    steps, left = [], list(tokens)
    while left:
        batch, left = left[:size], left[size:]
        steps.append(max(*batch, 2) - 1 if len(batch) > 1 else max(batch[0], 2) - 1)
    assert batch_lengths(tokens, size) == steps


@settings(max_examples=50)
@given(st.integers(2, 10), st.floats(1.05, 10), LENGTHS, st.integers(0, 4))
def test_warm_up_layers_are_within_every_depth(layers: int, speedup: float, lengths: list[int], warmup: int) -> None:
    """``top`` fits no depth below them; an order without warm-up layers is not bound by their number."""
    speedup, warmup = min(speedup, layers), min(warmup, layers)
    plan = fit(layers, speedup, lengths, warmup=warmup)
    assert plan.min_depth >= max(warmup, 1)
    if warmup == 0:
        assert plan.replace(warmup=1) == fit(layers, speedup, lengths)
    for order in ("bottom", "even"):
        free = fit(layers, speedup, lengths, warmup=warmup, order=order)
        assert free == fit(layers, speedup, lengths, order=order).replace(warmup=warmup)


def test_a_speedup_of_one_is_the_full_model() -> None:
    """Nothing to fit; and what no depth can give is refused."""
    assert fit(8, 1, [20]) == fit(8, 1.0, [20]) == Schedule.full(8)
    assert fit(8, 8, [20]).min_depth == 1
    for speedup in (0, 0.5, 8.5):
        with pytest.raises(ScheduleError, match="a speed-up is 1 to the number of layers"):
            fit(8, speedup, [20])
    with pytest.raises(ScheduleError, match="a depth is at most 8 layers, and at least the warm-up's 9"):
        fit(8, 2, [20], warmup=9)


def test_the_longest_text_is_half_a_million_steps() -> None:
    """As documented; a horizon twice as long is one that a schedule may have."""
    assert off(fit(8, 2, [500_000]), 2, [500_000]) <= TOLERANCE
    with pytest.raises(ScheduleError, match="from 0 to 500,000"):
        fit(8, 2, [500_001])


@pytest.mark.parametrize(("layers", "lengths"), [(32, [LONGEST, 400_000, 3]), (32, [40] * 10**5), (80, [300, 200, 4])])
def test_long_texts_and_many_of_them_are_fitted_at_once(
    layers: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """G: neither steps nor pairs of depths are gone through one by one."""
    looks: list[Schedule] = []
    ratio = Lengths.ratio

    def spied(self: Lengths, schedule: Schedule) -> float:
        looks.append(schedule)
        return ratio(self, schedule)

    monkeypatch.setattr(Lengths, "ratio", spied)
    assert off(fit(layers, 3, lengths), 3, lengths) <= TOLERANCE
    assert len(looks) < 5000


@pytest.mark.parametrize("lengths", [[], [0, 0], [-3], [5, -1], [2.5], [5, 2.5], ["40"], [True]])
def test_lengths_that_are_none_are_refused(lengths: list[Any]) -> None:
    """G: an error of ours with one line, and no hang."""
    with pytest.raises(ScheduleError, match="decode step"):
        fit(8, 2, lengths)  # wrong on purpose: what JSON or a command line may bring
