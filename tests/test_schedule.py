"""Schedules: depths never increase, layers are nested; decays, orders and budgets are what docs/method.md defines."""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipdecode import Schedule, ScheduleError
from skipdecode.errors import FileError
from skipdecode.schedule import (
    DECAYS,
    SkippedSpan,
    budget,
    choose_schedule,
    decay_weight,
    flat_depth,
    round_half_up,
    skipped_spans,
)

GOOD: dict[str, Any] = {"num_layers": 8, "max_depth": 6, "min_depth": 2, "horizon": 8}
LIST = {**GOOD, "decay": "list", "horizon": 3, "depths": (6, 4, 2)}
RATES = st.floats(min_value=0, exclude_min=True, allow_infinity=False)  # every rate that is allowed, tiny and huge
PAPER: dict[tuple[int, int | Fraction], tuple[int, int]] = {
    (24, 2): (16, 8),
    (24, 5): (6, 4),
    (32, 2): (22, 11),
    (32, 3): (14, 8),
    (32, 4): (10, 6),
    (32, 5): (8, 5),
}


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any valid schedule."""
    layers = draw(st.integers(1, 12))
    decay = draw(st.sampled_from(DECAYS))
    order = draw(st.sampled_from(["top", "bottom", "even"]) | st.permutations(range(layers)).map(tuple))
    depths = tuple(sorted(draw(st.lists(st.integers(1, layers), min_size=1, max_size=12)), reverse=True))
    horizon = len(depths) if decay == "list" else draw(st.integers(1, 20))
    most, least = depths[0], depths[0] if decay == "constant" else depths[-1]
    return Schedule(
        layers,
        most,
        least,
        horizon,
        decay=decay,
        order=order,
        warmup=draw(st.integers(0, least)),
        rate=draw(RATES),
        stairs=draw(st.integers(2, 6)),
        depths=depths if decay == "list" else None,
        prompt_decay=draw(st.integers(0, 8)),
        prompt_layers=draw(st.none() | st.integers(most, layers) | st.just("max")),
    )


def half_up(x: Fraction) -> int:
    """To the nearest whole number, halves up, exactly."""
    return math.floor(x + Fraction(1, 2))


def column_depths(schedule: Schedule, prompt_length: int, length: int) -> list[int]:
    """Depth of each column, by the definition."""
    return [
        schedule.prompt_depth(prompt_length - c) if c < prompt_length else schedule.depth(c - prompt_length)
        for c in range(length)
    ]


# --- what always holds


@given(schedules(), st.integers(1, 10))
def test_depth_never_increases_and_stays_in_its_bounds(schedule: Schedule, prompt_length: int) -> None:
    """Prompt and steps together: no column is deeper than the one before it."""
    depths = column_depths(schedule, prompt_length, prompt_length + schedule.horizon + 3)
    assert all(a >= b for a, b in itertools.pairwise(depths))
    assert all(schedule.min_depth <= d <= schedule.max_depth for d in depths[prompt_length:])
    assert all(schedule.max_depth <= d <= schedule.deepest for d in depths[:prompt_length])
    assert schedule.distinct_depths == tuple(sorted(set(depths[prompt_length:]), reverse=True))
    assert schedule.step_layer_sets == {schedule.layers(d) for d in depths[prompt_length:]}
    everywhere = column_depths(schedule, schedule.prompt_decay + 2, schedule.prompt_decay + 2)
    assert schedule.prompt_layer_sets == {schedule.layers(d) for d in everywhere}


@given(schedules())
def test_the_decay_spans_the_horizon(schedule: Schedule) -> None:
    """Step 0 runs max_depth, step horizon - 1 and all later ones min_depth."""
    if schedule.horizon > 1:
        assert schedule.depth(0) == schedule.max_depth
    assert {schedule.depth(schedule.horizon - 1 + later) for later in (0, 1, 1000)} == {schedule.min_depth}


@given(schedules())
def test_layers_are_nested(schedule: Schedule) -> None:
    """Depth n runs n layers in network order, among them all of depth n - 1; skipped spans are the rest."""
    before: set[int] = set()
    for depth in range(1, schedule.num_layers + 1):
        layers = schedule.layers(depth)
        assert len(layers) == depth
        assert list(layers) == sorted(set(layers))
        assert before < set(layers) <= set(range(schedule.num_layers))
        before = set(layers)
        spans = skipped_spans(layers, schedule.num_layers)
        skipped = [layer for span in spans for layer in range(span.start, span.stop)]
        assert sorted([*layers, *skipped]) == list(range(schedule.num_layers))
        assert all(a.stop < b.start for a, b in itertools.pairwise(spans))


@given(schedules(), st.integers(1, 10), st.integers(1, 35))
def test_columns_are_the_prefix_that_each_layer_runs(schedule: Schedule, prompt_length: int, length: int) -> None:
    """positions_per_layer() agrees with asking each position for its layers; what a layer runs is a prefix."""
    depths = column_depths(schedule, prompt_length, length)
    counts = schedule.positions_per_layer(prompt_length, length)
    for layer, count in enumerate(counts):
        assert [c for c, depth in enumerate(depths) if layer in schedule.layers(depth)] == list(range(count))
    assert sum(count > 0 for count in counts) <= max(depths)


@given(schedules(), st.integers(1, 50))
def test_average_depth_is_the_mean_of_the_depths(schedule: Schedule, length: int) -> None:
    """average_depth and layer_ratio are what the steps add up to."""
    mean = sum(schedule.depth(g) for g in range(length)) / length
    assert schedule.average_depth(length) == mean
    assert schedule.layer_ratio(length) == schedule.num_layers / mean


@given(schedules())
def test_json_round_trip(schedule: Schedule) -> None:
    """JSON brings back an equal, equally hashed schedule."""
    again = Schedule.from_dict(json.loads(json.dumps(schedule.to_dict())))
    assert again == schedule
    assert hash(again) == hash(schedule)


@given(schedules(), st.integers(1, 20))
def test_a_list_is_any_schedules_depths(schedule: Schedule, length: int) -> None:
    """from_depths runs the given depths, the last one from there on; its target is its ratio over its own length."""
    depths = [schedule.depth(g) for g in range(length)]
    listed = Schedule.from_depths(schedule.num_layers, depths, order=schedule.order, warmup=0)
    assert [listed.depth(g) for g in range(length + 2)] == [*depths, depths[-1], depths[-1]]
    assert (listed.max_depth, listed.min_depth, listed.horizon) == (depths[0], depths[-1], length)
    assert listed.target == round(schedule.num_layers * length / sum(depths), 2)


@given(schedules(), st.data())
def test_a_flat_copy_runs_one_depth_and_the_whole_prompt(schedule: Schedule, data: st.DataObject) -> None:
    depth = data.draw(st.integers(1, schedule.num_layers))
    flat = schedule.replace(warmup=0).flat(depth)
    assert flat.step_layer_sets == {flat.layers(depth)}
    assert flat.prompt_layer_sets == {tuple(range(schedule.num_layers))}


# --- single facts


def test_what_is_not_said_is_the_papers_form() -> None:
    """The defaults that every saved schedule counts on."""
    rest = {"decay": "linear", "order": "top", "warmup": 1, "rate": 3.0, "stairs": 4, "prompt_decay": 0}
    assert Schedule(**GOOD).to_dict() == GOOD | rest
    full = {"num_layers": 5, "max_depth": 5, "min_depth": 5, "horizon": 1, "decay": "constant", "warmup": 0}
    assert Schedule.full(5).to_dict() == rest | full


def test_depths_and_orders_by_hand() -> None:
    """round_half_up((1 - t) * 6 + t * 4) over five steps: 6, 5.5, 5, 4.5, 4; and the three orders."""
    assert [Schedule(24, 6, 4, horizon=5).depth(g) for g in range(7)] == [6, 6, 5, 5, 4, 4, 4]
    assert Schedule(8, 6, 2, horizon=1).depth(0) == 2
    assert Schedule(6, 3, 2, 4, warmup=1).ranking == (0, 5, 4, 3, 2, 1)
    assert Schedule(6, 3, 2, 4, warmup=2).ranking == (0, 1, 5, 4, 3, 2)
    assert Schedule(6, 3, 2, 4, order="bottom").ranking == (0, 1, 2, 3, 4, 5)
    assert Schedule(5, 3, 2, 4, order="even").ranking == (0, 4, 2, 1, 3)
    assert [str(span) for span in skipped_spans((0, 3, 4), 7)] == ["1-3", "5-7"]
    assert skipped_spans(range(7), 7) == []
    assert skipped_spans((1,), 2) == [SkippedSpan(0, 1)]


def test_full_runs_everything() -> None:
    assert Schedule.full(5).positions_per_layer(3, 9) == [9] * 5
    assert Schedule.full(5).is_full
    assert not Schedule(5, 5, 4, 2).is_full
    assert Schedule.for_speedup(1, 5) == Schedule.for_speedup(1, 5, 8, decay="linear") == Schedule.full(5)


def test_save_and_load(tmp_path: Path) -> None:
    schedule = Schedule(4, 3, 1, horizon=9, order=(2, 0, 1, 3), decay="exponential", rate=0.5)
    schedule.save(tmp_path / "schedule.json")
    assert Schedule.load(tmp_path / "schedule.json") == schedule
    with pytest.raises(FileError, match=r"nowhere\.json cannot be read"):
        Schedule.load(tmp_path / "nowhere.json")


def test_fields_of_a_later_version_are_left_out_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="ignored: later"):
        assert Schedule.from_dict(GOOD | {"later": 1}) == Schedule(**GOOD)


# --- which schedule applies

TRAINED = {
    1.0: Schedule.full(8),
    2.0: Schedule(8, 4, 4, 1, "constant", "top", 2),
    4.0: Schedule(8, 3, 1, 6, order="even"),
}


def test_the_slowest_trained_speed_above_one_is_the_default() -> None:
    """Never the fastest; without any, the full model."""
    assert choose_schedule(TRAINED, 8) == TRAINED[2]
    assert choose_schedule({4.0: TRAINED[4]}, 8) == TRAINED[4]
    assert choose_schedule({}, 8) == choose_schedule({1.0: TRAINED[1]}, 8) == Schedule.full(8)


def test_a_trained_speed_is_its_schedule_and_another_a_constant_one_like_it() -> None:
    """Order and bottom layers of the fastest trained one; never more bottom layers than the depth."""
    assert choose_schedule(TRAINED, 8, 4) == TRAINED[4]
    assert choose_schedule(TRAINED, 8, 1) == Schedule.full(8)
    assert choose_schedule(TRAINED, 8, 4, prompt_layers="max") == TRAINED[4].replace(prompt_layers="max")
    assert choose_schedule(TRAINED, 8, 3) == Schedule.for_speedup(3, 8, order="even")
    assert choose_schedule({2.0: TRAINED[2]}, 8, 2.7) == Schedule.for_speedup(2.7, 8, warmup=2)
    assert choose_schedule({2.0: TRAINED[2]}, 8, 8) == Schedule.for_speedup(8, 8, warmup=1)
    assert choose_schedule({}, 8, 2) == Schedule.for_speedup(2, 8)
    assert choose_schedule(TRAINED, 8, 4, order="bottom") == Schedule.for_speedup(4, 8, order="bottom", warmup=1)
    linear = choose_schedule({}, 8, 2, decay="linear", horizon=9)
    assert (linear.decay, linear.horizon) == ("linear", 9)


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
        assert decay_weight(decay, 0, 1, rate, stairs) == 0


@given(st.integers(0, 1000), st.integers(1, 1000))
def test_halves_are_rounded_up(whole: int, parts: int) -> None:
    """As exact arithmetic does it: a product that should be a half, but is a hair less, goes up too."""
    assert round_half_up(whole / parts) == half_up(Fraction(whole, parts))
    assert round_half_up(whole + 0.5) == round_half_up(math.nextafter(whole + 0.5, 0)) == whole + 1
    assert round_half_up(whole + 0.499999) == whole


@given(st.integers(1, 32), st.integers(1, 12), st.data())
def test_the_prompts_decay_is_linear(layers: int, span: int, data: st.DataObject) -> None:
    """From the prompt's layers, ``span`` places before its end, to max_depth at its last position."""
    most = data.draw(st.integers(1, layers))
    top = data.draw(st.integers(most, layers))
    schedule = Schedule(layers, most, 1, 4, warmup=0, prompt_decay=span, prompt_layers=top)
    assert schedule.prompt_depth(1) == most
    assert schedule.prompt_depth(span + 1) == schedule.prompt_depth(span + 9) == top
    for distance in range(2, span + 1):
        assert schedule.prompt_depth(distance) == half_up(most + Fraction((top - most) * (distance - 1), span - 1))


# --- orders and budgets


@pytest.mark.parametrize("layers", range(1, 13))
def test_an_order_ranks_every_layer_once(layers: int) -> None:
    """A ranking is a permutation; ``even`` takes the farthest layer each time, the lowest on ties."""
    for order in ("top", "bottom", "even"):
        for warmup in range(layers + 1):
            schedule = Schedule(layers, layers, layers, 1, "constant", order, warmup)
            assert sorted(schedule.ranking) == list(range(layers))
    even = Schedule(layers, layers, layers, 1, "constant", "even").ranking
    assert even[:2] == (0, layers - 1)[:layers]
    for count in range(2, layers):
        gaps = {i: min(abs(i - j) for j in even[:count]) for i in range(layers) if i not in even[:count]}
        assert even[count] == min(i for i, gap in gaps.items() if gap == max(gaps.values()))


def rule(speedup: Fraction, layers: int) -> tuple[int, int]:
    """The paper's rule, exactly: the share of max falls by 0.02 with each unit of speed-up, between 2/3 and 0.6."""
    share = min(max(Fraction(2, 3) - (speedup - 2) / 50, Fraction(3, 5)), Fraction(2, 3))
    total = 2 * layers / speedup
    most = min(half_up(total * share), layers)
    return most, min(max(half_up(total - most), 1), most)


@pytest.mark.parametrize("layers", [*range(1, 9), 12, 23, 24, 25, 32, 48])
def test_budgets_are_the_papers_and_else_the_rules(layers: int) -> None:
    """Every quarter of a speed-up, for falling and for constant depths."""
    for quarters in range(5, 4 * layers + 1):
        speedup = Fraction(quarters, 4)
        most, least = PAPER.get((layers, speedup), rule(speedup, layers))
        assert budget(float(speedup), layers) == (most, least)
        falling = Schedule.for_speedup(float(speedup), layers, 9, decay="linear", warmup=0)
        assert (falling.max_depth, falling.min_depth, falling.horizon) == (most, least, 9)
        off = {depth: abs(layers / Fraction(depth) - speedup) for depth in range(1, layers + 1)}
        nearest = min(off, key=off.__getitem__)
        assert flat_depth(float(speedup), layers) == nearest
        constant = Schedule.for_speedup(float(speedup), layers, warmup=0)
        assert (constant.decay, constant.max_depth, constant.min_depth) == ("constant", nearest, nearest)


def test_a_target_is_the_papers_name_and_else_the_ratio() -> None:
    """The paper calls 4.8 on 24 layers 5; every other budget is named by its ratio, to two places."""
    for (layers, speedup), depths in PAPER.items():
        assert Schedule(layers, *depths, 4).target == speedup
    assert Schedule(24, 7, 4, 4).target == 4.36
    assert Schedule(23, 6, 4, 4).target == 4.6


# --- what is refused

WRONG = [
    ({**LIST, "depths": (6, 7, 2)}, "never increase"),
    ({**LIST, "depths": (6, 2)}, "from_depths"),
    ({**GOOD, "decay": "list"}, "go together"),
    ({**GOOD, "depths": (6, 4, 2)}, "go together"),
    ({**GOOD, "min_depth": 7}, "min 7, max 6"),
    ({**GOOD, "max_depth": 9}, "max 9, layers 8"),
    ({**GOOD, "min_depth": 0}, "min 0"),
    ({**GOOD, "warmup": 3}, r"warmup must be 0 to min_depth \(2\), not 3"),
    ({**GOOD, "warmup": -1}, "warmup must be"),
    ({**GOOD, "horizon": 0}, "horizon must be 1 or more, not 0"),
    ({**GOOD, "prompt_decay": -1}, "prompt_decay must be 0 or more"),
    ({**GOOD, "prompt_layers": 1}, r"prompt_layers must be max_depth \(6\) to num_layers \(8\), not 1"),
    ({**GOOD, "prompt_layers": 99}, "prompt_layers must be"),
    ({**GOOD, "prompt_layers": "low"}, "prompt_layers must be"),
    ({**GOOD, "stairs": 1}, "stairs"),
    ({**GOOD, "order": (0, 1, 2, 3, 4, 5, 6, 6)}, "once, not"),
    ({**GOOD, "order": (0, 1, 2)}, "once, not"),
    ({**GOOD, "order": "middle"}, "top, bottom, even"),
    ({**GOOD, "decay": "quadratic"}, "decay must be one of"),
    ({**GOOD, "decay": "constant"}, "max_depth equal to min_depth"),
    *(({**GOOD, "rate": rate}, "rate") for rate in (math.nan, math.inf, 0, -1.0)),
]


@pytest.mark.parametrize(("values", "message"), WRONG)
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    """One line that names the value, from the constructor and from JSON alike."""
    with pytest.raises(ScheduleError, match=message) as caught:
        Schedule(**values)
    assert "\n" not in str(caught.value)
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_dict(values)


@pytest.mark.parametrize("text", ['{"num_layers": 8, "horizon": 4}', "[8, 6, 2, 8]", "null", '"8"', "{", ""])
def test_files_that_hold_no_schedule_are_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises((ScheduleError, FileError), match=r"plan\.json.*not"):
        Schedule.load(tmp_path / "plan.json")


@pytest.mark.parametrize("speedup", [0, 0.5, 8.5, math.nan, math.inf, -2])
def test_wrong_speedups_are_refused(speedup: Any) -> None:
    with pytest.raises(ScheduleError, match="speed-up is 1 to the number of layers"):
        Schedule.for_speedup(speedup, 8)
    for depth in (0, 9):
        with pytest.raises(ScheduleError, match="a depth is 1 to 8"):
            Schedule(**GOOD).layers(depth)
