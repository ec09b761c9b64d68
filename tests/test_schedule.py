"""The schedule: depths never increase, layers are nested, and every wrong value is one clear error."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipdecode import Schedule, ScheduleError
from skipdecode.errors import FileError
from skipdecode.schedule import DECAYS, MOST_LAYERS, MOST_TOKENS, parse_prompt_layers

RATES = st.floats(min_value=0, exclude_min=True, allow_infinity=False)  # every rate that is allowed, tiny and huge


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
    assert all(schedule.max_depth <= d <= schedule.num_layers for d in depths[:prompt_length])
    assert set(depths[prompt_length:]) == set(schedule.distinct_depths)
    assert schedule.distinct_depths == tuple(sorted(set(schedule.distinct_depths), reverse=True))


@given(schedules())
def test_the_decay_spans_the_horizon(schedule: Schedule) -> None:
    """Step 0 runs max_depth, step horizon - 1 and all later ones min_depth."""
    if schedule.horizon > 1:
        assert schedule.depth(0) == schedule.max_depth
    assert {schedule.depth(schedule.horizon - 1 + later) for later in (0, 1, 1000)} == {schedule.min_depth}


@given(schedules())
def test_layers_are_nested(schedule: Schedule) -> None:
    """Depth n runs n layers in network order, among them all of depth n - 1."""
    before: set[int] = set()
    for depth in range(1, schedule.num_layers + 1):
        layers = schedule.layers(depth)
        assert len(layers) == depth
        assert list(layers) == sorted(set(layers))
        assert before < set(layers) <= set(range(schedule.num_layers))
        before = set(layers)


@given(schedules(), st.integers(1, 10), st.integers(1, 35))
def test_columns_are_the_prefix_that_each_layer_runs(schedule: Schedule, prompt_length: int, length: int) -> None:
    """positions_per_layer() agrees with asking each position for its layers; what a layer runs is a prefix."""
    depths = column_depths(schedule, prompt_length, length)
    for layer, count in enumerate(schedule.positions_per_layer(prompt_length, length)):
        assert [c for c, depth in enumerate(depths) if layer in schedule.layers(depth)] == list(range(count))


@given(schedules(), st.integers(1, 50))
def test_average_depth_is_the_mean_of_the_depths(schedule: Schedule, length: int) -> None:
    """average_depth and layer_ratio are what the steps add up to."""
    mean = sum(schedule.depth(g) for g in range(length)) / length
    assert schedule.average_depth(length) == mean
    assert schedule.layer_ratio(length) == schedule.num_layers / mean


@given(schedules())
def test_json_round_trip(schedule: Schedule) -> None:
    """JSON brings back an equal, equally hashed schedule."""
    again = Schedule.from_dict(json.loads(schedule.to_json()))
    assert again == schedule
    assert hash(again) == hash(schedule)


@given(schedules(), st.integers(1, 40))
def test_prompt_decay_counts_from_the_end(schedule: Schedule, distance: int) -> None:
    """Farther from the prompt's end than prompt_decay the prompt's layers run; its last position runs max_depth."""
    assert schedule.prompt_depth(distance + schedule.prompt_decay) == schedule.deepest
    last = schedule.max_depth if schedule.prompt_decay else schedule.deepest
    assert schedule.prompt_depth(1) == last


@given(schedules(), st.integers(0, 12), st.integers(1, 30))
def test_a_layer_above_the_prompts_depth_never_runs(schedule: Schedule, prompt_length: int, length: int) -> None:
    counts = schedule.positions_per_layer(prompt_length, prompt_length + length)
    assert sum(count > 0 for count in counts) <= schedule.deepest


@given(schedules(), st.floats(1.5, 3))
def test_a_low_prompt_stays_low_at_another_speed(schedule: Schedule, speedup: float) -> None:
    """As many layers as the first step stay that at another budget; another number stays, or is refused."""
    speedup = min(speedup, schedule.num_layers)
    if schedule.num_layers < 2 or schedule.decay == "constant":
        return
    flat = schedule.replace(warmup=0)
    most = Schedule.for_speedup(
        speedup, flat.num_layers, flat.horizon, **flat.style | {"prompt_layers": None}
    ).max_depth
    if flat.deepest != flat.max_depth and flat.deepest < most:
        with pytest.raises(ScheduleError, match="prompt_layers"):
            Schedule.for_speedup(speedup, flat.num_layers, flat.horizon, **flat.style)
        return
    other = Schedule.for_speedup(speedup, flat.num_layers, flat.horizon, **flat.style)
    low = flat.prompt_layers is not None and flat.deepest == flat.max_depth
    assert other.deepest == (other.max_depth if low else flat.deepest)


@given(st.integers(1, 64), st.floats(1, 64), st.integers(1, 40), st.sampled_from(["linear", "power", "step"]))
def test_a_budget_keeps_the_rule(layers: int, speedup: float, horizon: int, decay: str) -> None:
    """L / ((max + min) / 2) is the speed-up asked for, as nearly as whole layers allow."""
    speedup = min(speedup, float(layers))
    schedule = Schedule.for_speedup(speedup, layers, horizon, decay=decay, warmup=0)
    wanted = 2 * layers / speedup
    assert abs(schedule.max_depth + schedule.min_depth - wanted) <= 1.5
    again = Schedule.for_speedup(speedup, schedule.num_layers, schedule.horizon, **schedule.style)
    assert again == schedule or speedup == 1


@given(schedules(), st.integers(1, 20))
def test_a_list_is_any_schedules_depths(schedule: Schedule, length: int) -> None:
    """from_depths runs what it is given, the last depth from there on; its target is its ratio over its own length."""
    depths = [schedule.depth(g) for g in range(length)]
    style = {"order": schedule.order, "prompt_decay": schedule.prompt_decay, "warmup": 0}
    listed = Schedule.from_depths(schedule.num_layers, depths, **style)
    assert [listed.depth(g) for g in range(length + 2)] == [*depths, depths[-1], depths[-1]]
    assert (listed.max_depth, listed.min_depth, listed.horizon) == (depths[0], depths[-1], length)
    assert listed.target == round(schedule.num_layers * length / sum(depths), 2)


@given(schedules(), st.integers(0, 8))
def test_replacing_changes_one_field(schedule: Schedule, prompt_decay: int) -> None:
    """All other fields stay."""
    changed = schedule.replace(prompt_decay=prompt_decay)
    assert changed.to_dict() == schedule.to_dict() | {"prompt_decay": prompt_decay}


# --- single facts


def test_what_is_not_said_is_the_papers_form() -> None:
    """The defaults that every saved schedule and every command line counts on."""
    rest = {"decay": "linear", "order": "top", "warmup": 1, "rate": 3.0, "stairs": 4, "prompt_decay": 0}
    assert Schedule(**GOOD).to_dict() == GOOD | rest
    full = {"num_layers": 5, "max_depth": 5, "min_depth": 5, "horizon": 1, "decay": "constant", "warmup": 0}
    assert Schedule.full(5).to_dict() == rest | full


@pytest.mark.parametrize("order", ["bottom", "even", (2, 0, 1, 3)])
def test_a_warm_up_binds_the_order_it_belongs_to_alone(order: Any) -> None:
    """Only ``top`` ranks warm-up layers: elsewhere the number means nothing and is not refused."""
    assert Schedule(4, 3, 1, 4, order=order, warmup=3).layers(4) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("layers", "speedup", "depths"),
    [(24, 2, (16, 8)), (24, 5, (6, 4)), (32, 2, (22, 11)), (32, 3, (14, 8)), (32, 4, (10, 6)), (32, 5, (8, 5))],
)
def test_paper_budgets_are_exact(layers: int, speedup: int, depths: tuple[int, int]) -> None:
    """The paper's budgets (section 6) come out as printed, for whole speed-ups given as int or float."""
    for value in (speedup, float(speedup)):
        schedule = Schedule.for_speedup(value, layers, horizon=64, decay="linear")
        assert (schedule.max_depth, schedule.min_depth) == depths
        assert (schedule.decay, schedule.order, schedule.warmup) == ("linear", "top", 1)


def test_linear_depths_by_hand() -> None:
    """round_half_up((1 - t) * 6 + t * 4) over five steps: 6, 5.5, 5, 4.5, 4."""
    assert [Schedule(24, 6, 4, horizon=5).depth(g) for g in range(7)] == [6, 6, 5, 5, 4, 4, 4]


def test_orders_by_hand() -> None:
    """``top`` ranks the warm-up, then from the top down; ``bottom`` upwards; ``even`` first, last, middle."""
    assert Schedule(6, 3, 2, 4, warmup=1).ranking == (0, 5, 4, 3, 2, 1)
    assert Schedule(6, 3, 2, 4, warmup=2).ranking == (0, 1, 5, 4, 3, 2)
    assert Schedule(6, 3, 2, 4, order="bottom").ranking == (0, 1, 2, 3, 4, 5)
    assert Schedule(5, 3, 2, 4, order="even").ranking == (0, 4, 2, 1, 3)


def test_horizon_of_one_is_min_depth_at_once() -> None:
    """H = 1 means t = 1."""
    assert Schedule(8, 6, 2, horizon=1).depth(0) == 2


def test_full_runs_everything() -> None:
    """The full schedule runs each layer on each column; so does a speed-up of 1."""
    assert Schedule.full(5).positions_per_layer(3, 9) == [9] * 5
    assert Schedule.full(5).is_full
    assert not Schedule(5, 5, 4, 2).is_full
    assert Schedule.for_speedup(1, 5, horizon=8, decay="linear") == Schedule.full(5)


def test_save_and_load(tmp_path: Path) -> None:
    """A saved file loads as an equal schedule."""
    schedule = Schedule(4, 3, 1, horizon=9, order=(2, 0, 1, 3), decay="exponential", rate=0.5)
    schedule.save(tmp_path / "schedule.json")
    assert Schedule.load(tmp_path / "schedule.json") == schedule


@pytest.mark.parametrize("decay", ["power", "exponential"])
@pytest.mark.parametrize("rate", [5e-324, 1e-300, 1e-17, 800.0, 1.7e308])
def test_extreme_rates_still_span_the_horizon(decay: str, rate: float) -> None:
    """A rate near 0 is next to a straight line in its own scale, a huge one a cliff; neither divides by zero."""
    schedule = Schedule(8, 7, 2, horizon=6, decay=decay, rate=rate)
    depths = [schedule.depth(g) for g in range(6)]
    assert depths[0] == 7
    assert depths[-1] == 2
    assert depths == sorted(depths, reverse=True)


# --- what is refused

GOOD: dict[str, Any] = {"num_layers": 8, "max_depth": 6, "min_depth": 2, "horizon": 8}
LIST = {**GOOD, "decay": "list", "horizon": 3, "depths": (6, 4, 2)}
WRONG = [
    ({**LIST, "depths": (6, 2, 4), "min_depth": 4}, "never increase"),
    ({**LIST, "depths": (6, 2)}, "from_depths"),
    ({**LIST, "depths": (6, 4.0, 2)}, "each of depths"),
    ({**LIST, "depths": (6, True, 1), "min_depth": 1}, "each of depths"),
    ({**LIST, "depths": (6, 4, 0), "min_depth": 1}, "each of depths"),
    ({**LIST, "depths": ()}, "needs depths"),
    ({**LIST, "depths": 6}, "depths"),
    ({**LIST, "depths": "642"}, "depths"),
    ({**GOOD, "decay": "list"}, "needs depths"),
    ({**GOOD, "depths": (6, 4, 2)}, "depths go with decay 'list'"),
    ({**GOOD, "min_depth": 7}, "min_depth 7 is greater than max_depth 6"),
    ({**GOOD, "max_depth": 9}, "max_depth 9 is greater than num_layers 8"),
    ({**GOOD, "warmup": 3}, "warmup 3 is greater than min_depth 2"),
    ({**GOOD, "warmup": -1}, "warmup must be a whole number"),
    ({**GOOD, "horizon": 0}, "horizon must be a whole number from 1 to 1,000,000, not 0"),
    ({**GOOD, "min_depth": 0}, "min_depth must be a whole number"),
    ({**GOOD, "prompt_decay": -1}, "prompt_decay must be a whole number"),
    ({**GOOD, "prompt_layers": 1}, "prompt_layers is max_depth .* to num_layers .*, not 1: depths never increase"),
    ({**GOOD, "prompt_layers": 99}, "prompt_layers is max_depth .* to num_layers"),
    ({**GOOD, "prompt_layers": "low"}, "prompt_layers must be a whole number"),
    ({**GOOD, "prompt_layers": True}, "prompt_layers must be a whole number"),
    ({**GOOD, "stairs": 1}, "stairs"),
    ({**GOOD, "order": (0, 1, 2, 3, 4, 5, 6, 6)}, "exactly once"),
    ({**GOOD, "order": (0, 1, 2)}, "exactly once"),
    ({**GOOD, "order": (0, 1, 2, 3, 4, 5, 6, 7.0)}, "exactly once"),
    ({**GOOD, "order": (0, True, 2, 3, 4, 5, 6, 7)}, "exactly once"),
    ({**GOOD, "order": (0, "1", 2, 3, 4, 5, 6, 7)}, "exactly once"),
    ({**GOOD, "order": "middle"}, "top, bottom, even"),
    ({**GOOD, "order": 3}, "permutation"),
    ({**GOOD, "decay": "quadratic"}, "decay must be one of"),
    ({**GOOD, "decay": "constant"}, "max_depth equal to min_depth"),
    *(({**GOOD, "rate": rate}, "rate") for rate in (math.nan, math.inf, 0, -1.0, True, "3", None)),
    *(
        ({**GOOD, name: value}, f"{name} must be a whole number")
        for name in ("num_layers", "max_depth", "min_depth", "horizon", "warmup", "stairs", "prompt_decay")
        for value in (True, 2.0, "2", None)
    ),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=lambda x: x.replace(" ", "-") if isinstance(x, str) else "")
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    """One line that names the value, from the constructor and from JSON alike."""
    with pytest.raises(ScheduleError, match=message) as caught:
        Schedule(**values)
    assert "\n" not in str(caught.value)
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_dict(values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({**GOOD, "": 1}), "unknown schedule keys: ''; known are"),
        (json.dumps({**GOOD, "dephts": [1]}), "unknown schedule keys: 'dephts'; known are"),
        (json.dumps({"num_layers": 8, "horizon": 4}), "needs max_depth, min_depth"),
        ("[8, 6, 2, 8]", "JSON object, not list"),
        ("null", "JSON object, not NoneType"),
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ("[" * 100_000, "nested too deep"),
        ('{"num_layers": 8, "max_depth": 8, "min_depth": 1, "horizon": 1e20}', "horizon must be a whole number"),
        ('{"num_layers": 1000000, "max_depth": 8, "min_depth": 1, "horizon": 9}', "num_layers must be a whole"),
    ],
)
def test_wrong_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    """Unknown keys, missing keys and what is no JSON object."""
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises((ScheduleError, FileError), match=rf"plan\.json.*{message}"):
        Schedule.load(tmp_path / "plan.json")


@pytest.mark.parametrize("text", ["a note of mine\n", "{}", '{"num_layers": 8}', "[" * 100_000])
def test_only_a_schedule_is_written_over(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F4: what is there and is no schedule stays; and a failing disk leaves the schedule that was there."""
    path, plan = tmp_path / "plan.json", Schedule(**GOOD)
    path.write_text(text)
    with pytest.raises(FileError, match="was not written by skipdecode"):
        plan.save(path)
    assert path.read_text() == text
    path.unlink()
    plan.save(path)
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(OSError, match="no space"):
        plan.replace(horizon=3).save(path)
    assert Schedule.load(path) == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """G: missing, damaged or of another shape."""
    with pytest.raises(FileError, match=r"nowhere\.json cannot be read"):
        Schedule.load(tmp_path / "nowhere.json")
    (tmp_path / "cut.json").write_text('{"num_layers": 8, "max')
    with pytest.raises(FileError, match=r"cut\.json is not JSON"):
        Schedule.load(tmp_path / "cut.json")
    (tmp_path / "list.json").write_text("[8]")
    with pytest.raises(ScheduleError, match=r"list\.json: a schedule is a JSON object"):
        Schedule.load(tmp_path / "list.json")


@pytest.mark.slow
@pytest.mark.parametrize("order", ["top", "bottom", "even"])
def test_nothing_hangs_at_the_limits(order: str) -> None:
    """G: the most layers and tokens there may be take a second, not hours."""
    plan = Schedule(MOST_LAYERS, 600, 2, MOST_TOKENS, order=order)
    assert sorted(plan.ranking) == list(range(MOST_LAYERS))
    assert plan.depth(MOST_TOKENS) == 2
    assert 1 < plan.layer_ratio(MOST_TOKENS) < MOST_LAYERS


@pytest.mark.parametrize("speedup", [0, 0.5, 8.5, math.nan, math.inf, -2, "2", None])
def test_wrong_speedups_are_refused(speedup: Any) -> None:
    """A speed-up lies between 1 and the number of layers."""
    with pytest.raises(ScheduleError, match="speed-up is 1 to the number of layers"):
        Schedule.for_speedup(speedup, 8, horizon=8, decay="linear")


def test_the_most_layers_and_tokens_are_as_documented() -> None:
    """1024 layers and a million tokens are a schedule, one more of either is none."""
    most = Schedule(1024, 1024, 1, horizon=1_000_000, prompt_decay=1_000_000)
    for field in ("num_layers", "horizon", "prompt_decay"):
        with pytest.raises(ScheduleError, match=field):
            most.replace(**{field: getattr(most, field) + 1})


@pytest.mark.parametrize("layers", [0, -1, 2.0, True, "8", None])
def test_a_speedup_of_no_whole_number_of_layers_is_refused(layers: Any) -> None:
    """What a command line or JSON may bring for the layers is an error of ours, as for the speed-up."""
    with pytest.raises(ScheduleError, match="num_layers must be a whole number"):
        Schedule.for_speedup(2, layers, horizon=8, decay="linear")


def test_wrong_questions_are_refused() -> None:
    """Steps, depths and lengths outside their ranges."""
    schedule = Schedule(**GOOD)
    with pytest.raises(ScheduleError, match="a step is 0 or more"):
        schedule.depth(-1)
    for depth in (0, 9):
        with pytest.raises(ScheduleError, match="a depth is 1 to 8"):
            schedule.layers(depth)
    with pytest.raises(ScheduleError, match="length must be a whole number"):
        schedule.average_depth(0)
    with pytest.raises(ScheduleError, match="at least one number"):
        Schedule.from_depths(8, [])


@given(st.integers(1, 999_999))
def test_prompt_layers_are_read_from_numbers_their_digits_and_a_word(number: int) -> None:
    """As options and files give them; ``max`` and nothing stay what they are."""
    assert parse_prompt_layers(number) == parse_prompt_layers(str(number)) == number
    assert (parse_prompt_layers("max"), parse_prompt_layers(None)) == ("max", None)


@pytest.mark.parametrize("value", [0, -1, True, 4.0, "0", "-1", "4.5", "1000000", "", "most", "²", {4}])
def test_other_prompt_layers_are_refused(value: object) -> None:
    """With the value that was given."""
    with pytest.raises(ScheduleError, match=r"prompt_layers is 'max' or a number of layers, not '"):
        parse_prompt_layers(value)
