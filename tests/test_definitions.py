"""Decays, orders and budgets are what their definitions say, recomputed here from docs/method.md."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipdecode import Schedule
from skipdecode.latency.fitting import fit
from skipdecode.schedule import (
    budget,
    decay_weight,
    flat_depth,
    interpolate,
    ranking,
    round_half_up,
    share_of_max,
    target,
)

PAPER: dict[tuple[int, int | Fraction], tuple[int, int]] = {
    (24, 2): (16, 8),
    (24, 5): (6, 4),
    (32, 2): (22, 11),
    (32, 3): (14, 8),
    (32, 4): (10, 6),
    (32, 5): (8, 5),
}


def half_up(x: Fraction) -> int:
    """To the nearest whole number, halves up, exactly."""
    return math.floor(x + Fraction(1, 2))


# --- decays


@given(st.integers(2, 40), st.floats(0.01, 10), st.integers(2, 8), st.data())
def test_a_decay_is_its_formula(horizon: int, rate: float, stairs: int, data: st.DataObject) -> None:
    """Each shape as its formula has it, scaled to fall from 1 to 0."""
    step = data.draw(st.integers(0, horizon - 1))
    t = step / (horizon - 1)

    def scaled(now: float, end: float) -> float:
        return (now - end) / (1 - end)

    stair = min(step * stairs // (horizon - 1), stairs - 1)
    expected = {
        "linear": 1 - t,
        "cosine": math.cos(math.pi * t / 2) ** 2,
        "power": scaled((step + 1) ** -rate, horizon**-rate),
        "exponential": scaled(math.exp(-rate * t), math.exp(-rate)),
        "step": 1 - stair / (stairs - 1),
    }
    for decay, weight in expected.items():
        if decay != "step" or (step * stairs) % (horizon - 1):  # on an edge, t * stairs itself is rounded
            assert decay_weight(decay, step, horizon, rate, stairs) == pytest.approx(weight, abs=1e-9)


@pytest.mark.parametrize("decay", ["linear", "cosine", "power", "exponential", "step"])
def test_a_horizon_of_one_leaves_nothing(decay: str) -> None:
    """H = 1 means t = 1."""
    assert decay_weight(decay, 0, 1, 3.0, 4) == 0


@pytest.mark.parametrize("stairs", [2, 3, 4, 5])
def test_stairs_are_so_many_equal_levels(stairs: int) -> None:
    """Over many steps, every level comes, and each lasts as long but for the last step's own."""
    weights = [decay_weight("step", g, 60 * stairs + 1, 1.0, stairs) for g in range(60 * stairs + 1)]
    levels = sorted(set(weights), reverse=True)
    assert levels == pytest.approx([1 - i / (stairs - 1) for i in range(stairs)])
    assert [weights.count(level) for level in levels] == [60] * (stairs - 1) + [61]


@given(st.integers(0, 1000), st.integers(1, 1000))
def test_halves_are_rounded_up(whole: int, parts: int) -> None:
    """As exact arithmetic does it: a product that should be a half, but is a hair less, goes up too."""
    assert round_half_up(whole / parts) == half_up(Fraction(whole, parts))
    assert round_half_up(whole + 0.5) == round_half_up(math.nextafter(whole + 0.5, 0)) == whole + 1
    assert round_half_up(whole + 0.499999) == whole


@given(st.floats(-0.5, 1.5), st.integers(1, 64), st.integers(1, 64))
def test_a_mix_stays_between_its_ends(weight: float, most: int, least: int) -> None:
    """Whatever the weight; and it is the nearest whole number."""
    least = min(most, least)
    depth = interpolate(weight, most, least)
    assert least <= depth <= most
    exact = Fraction(weight) * most + (1 - Fraction(weight)) * least
    assert abs(depth - min(max(exact, Fraction(least)), Fraction(most))) <= Fraction(1, 2) + Fraction(1, 10**8)


@given(st.integers(1, 32), st.integers(1, 12), st.data())
def test_the_prompts_decay_is_linear(layers: int, span: int, data: st.DataObject) -> None:
    """From the prompt's layers, ``span`` places before its end, to max_depth at its last position."""
    most = data.draw(st.integers(1, layers))
    top = data.draw(st.integers(most, layers))
    schedule = Schedule(layers, most, 1, 4, warmup=0, prompt_decay=span, prompt_layers=top)
    assert schedule.prompt_depth(1) == most
    assert schedule.prompt_depth(span + 1) == top
    for distance in range(2, span + 1):
        assert schedule.prompt_depth(distance) == half_up(most + Fraction((top - most) * (distance - 1), span - 1))


# --- orders


@pytest.mark.parametrize("layers", range(1, 13))
def test_an_order_ranks_every_layer_once(layers: int) -> None:
    """A ranking is a permutation, of one layer too; ``even`` takes the farthest layer each time, the lowest on ties."""
    for order in ("top", "bottom", "even"):
        for warmup in range(layers + 1):
            assert sorted(ranking(order, layers, warmup)) == list(range(layers))
    even = ranking("even", layers, 0)
    assert even[:2] == (0, layers - 1)[:layers]
    for count in range(2, layers):
        gaps = {i: min(abs(i - j) for j in even[:count]) for i in range(layers) if i not in even[:count]}
        assert even[count] == min(i for i, gap in gaps.items() if gap == max(gaps.values()))


# --- budgets


def rule(speedup: Fraction, layers: int) -> tuple[int, int]:
    """The paper's rule, exactly: the share of max falls by 0.02 with each unit of speed-up, between 2/3 and 0.6."""
    share = min(max(Fraction(2, 3) - (speedup - 2) / 50, Fraction(3, 5)), Fraction(2, 3))
    total = 2 * layers / speedup
    most = min(half_up(total * share), layers)
    return most, min(max(half_up(total - most), 1), most)


@pytest.mark.parametrize("layers", range(1, 49))
def test_budgets_are_the_papers_and_else_the_rules(layers: int) -> None:
    """Every quarter of a speed-up on every number of layers."""
    for quarters in range(4, 4 * layers + 1):
        speedup = Fraction(quarters, 4)
        assert budget(float(speedup), layers) == PAPER.get((layers, speedup), rule(speedup, layers))
        off = {depth: abs(layers / Fraction(depth) - speedup) for depth in range(1, layers + 1)}
        assert flat_depth(float(speedup), layers) == min(off, key=off.__getitem__)
        assert share_of_max(float(speedup)) == pytest.approx(
            float(min(max(Fraction(2, 3) - (speedup - 2) / 50, Fraction(3, 5)), Fraction(2, 3)))
        )


def test_a_flat_depth_is_at_least_one_layer() -> None:
    """However few layers there are."""
    assert flat_depth(9, 4) == 1


@pytest.mark.parametrize("layers", [5, 23, 24, 25, 31, 32, 33])
def test_a_target_is_the_papers_name_and_else_the_ratio(layers: int) -> None:
    """The paper calls 4.8 on 24 layers 5; every other budget is named by its ratio, to two places."""
    names = {(n, *depths): float(speedup) for (n, speedup), depths in PAPER.items()}
    for most in range(1, layers + 1):
        for least in range(1, most + 1):
            expected = names.get((layers, most, least), round(layers / ((most + least) / 2), 2))
            assert target(most, least, layers) == expected
            assert Schedule(layers, most, least, 4, warmup=0).target == expected


@given(st.integers(1, 64), st.floats(1, 64) | st.integers(20, 1280).map(lambda n: n / 20))
def test_a_constant_depth_is_the_nearest_to_the_speedup(layers: int, speedup: float) -> None:
    """for_speedup with the constant decay: one depth at every step, the same that fitting to lengths takes."""
    speedup = min(speedup, float(layers))
    schedule = Schedule.for_speedup(speedup, layers, horizon=8, decay="constant", warmup=0)
    assert schedule.max_depth == schedule.min_depth == flat_depth(speedup, layers) <= layers
    assert schedule.max_depth == fit(layers, speedup, [9, 30], decay="constant", warmup=0).max_depth
