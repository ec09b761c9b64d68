"""The cost model and the planner: predictions are sums of what is measured, a speed-up is had or refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skipdecode.latency.check_profile import check_profile
from transformers import LlamaConfig

from helpers.profiles import LENGTHS, made
from skipdecode import Schedule, ScheduleError
from skipdecode.errors import FileError, SkipDecodeError, UsageError
from skipdecode.latency.fitting import constant_schedules
from skipdecode.latency.planner import CLOCKS, SHORT, Predictor, Workload, plan, workloads
from skipdecode.latency.profile import Pass, Profile, shape_of
from skipdecode.loading import device


def summed(profile: Profile, schedule: Schedule, work: Workload) -> tuple[float, float]:
    """Seconds of the prompt and of all decode steps, layer by layer and step by step."""
    prompt = profile.prompt(work.batch_size, work.prompt_tokens).outside_layers
    for layer, count in enumerate(schedule.positions_per_layer(work.prompt_tokens, work.prompt_tokens)):
        prompt += profile.prompt(work.batch_size, count).layers[profile.layers[layer]] if count else 0
    steps = 0.0
    for g in range(work.steps):
        one = profile.step(work.batch_size, work.prompt_tokens + g + 1)
        steps += one.outside_layers + sum(one.layers[profile.layers[i]] for i in schedule.layers(schedule.depth(g)))
    return prompt, steps


@st.composite
def cases(draw: st.DrawFn) -> tuple[Profile, list[Workload], dict[str, Any]]:
    """A machine with one or two kinds of layers, batches, and a form."""
    two = draw(st.booleans())
    cost = st.floats(1e-4, 5e-3)
    profile = made(
        layers=tuple(draw(st.lists(st.integers(0, int(two)), min_size=12, max_size=12))),
        outside=draw(st.floats(0, 0.02)),
        weights=tuple(draw(cost) for _ in range(1 + two)),
        context=tuple(draw(st.floats(0, 1e-6)) for _ in range(1 + two)),
        prompt=draw(st.floats(1e-6, 1e-4)),
    )
    works = [Workload(draw(st.integers(1, 16)), draw(st.integers(1, 200)), draw(st.integers(2, 60))) for _ in range(2)]
    style: dict[str, Any] = {"order": draw(st.sampled_from(["top", "bottom", "even"]))}
    style |= draw(st.sampled_from([{}, {"prompt_layers": "max"}, {"decay": "constant"}, {"prompt_decay": 5}]))
    return profile, works, style


@settings(max_examples=40)
@given(cases(), st.integers(1, 12), st.integers(1, 12), st.integers(1, 80))
def test_a_prediction_is_the_sum_of_its_steps(
    case: tuple[Profile, list[Workload], dict[str, Any]], most: int, least: int, horizon: int
) -> None:
    """Prefix sums by layer give what adding up step by step gives."""
    profile, works, style = case
    most, least = max(most, least), min(most, least)
    least = most if style.get("decay") else least
    schedule = Schedule(12, most, least, horizon, **style)
    predictor = Predictor(profile, works, "job")
    expected = [sum(parts) for parts in zip(*(summed(profile, schedule, work) for work in works), strict=True)]
    seconds = predictor.seconds(schedule)
    assert [seconds.prompt, seconds.steps] == pytest.approx(expected, rel=1e-9)
    full = sum(sum(summed(profile, Schedule.full(12), work)) for work in works)
    assert predictor.ratio(schedule) == pytest.approx(full / seconds.job, rel=1e-9)


@pytest.mark.parametrize(
    ("works", "near"), [([Workload(3, 20, 12), Workload(1, 40, 30)], 1e-9), ([Workload(2, 16, 600)], 1e-3)]
)
def test_a_prediction_for_known_batches(works: list[Workload], near: float) -> None:
    """To the last digit, but for long texts, whose steps are sampled."""
    profile, schedule = made((0, 1) * 6, 0.01, (0.001, 0.003), (1e-5, 1e-6)), Schedule(12, 9, 4, 20)
    seconds = Predictor(profile, works).seconds(schedule)
    prompts, steps = map(sum, zip(*(summed(profile, schedule, work) for work in works), strict=True))
    assert (seconds.prompt, seconds.steps) == pytest.approx((prompts, steps), rel=near)
    rest = sum(profile.step(work.batch_size, 50).rest * work.steps for work in works)
    assert seconds.rest == pytest.approx(rest)


@settings(max_examples=60)
@given(cases(), st.floats(1, 12), st.sampled_from(["step", "job"]))
def test_a_speedup_is_had_or_refused(
    case: tuple[Profile, list[Workload], dict[str, Any]], speedup: float, clock: str
) -> None:
    """Nothing planned is slower than asked by more than 2%; a refusal is right, and says the most that can be had."""
    profile, works, style = case
    predictor = Predictor(profile, works, clock)
    most = predictor.ratio(constant_schedules(12, **style)[0])
    if most < speedup * SHORT:
        with pytest.raises(ScheduleError, match=f"at most {most:.2f}x"):
            plan(predictor, speedup, **style)
        return
    schedule = plan(predictor, speedup, **style)
    assert predictor.ratio(schedule) >= speedup * SHORT
    if speedup > 1 and not style.get("decay"):
        # One layer more at every step would be too slow, or it is the form that leaves no choice.
        deeper = Schedule(
            12, min(schedule.max_depth + 2, 12), min(schedule.min_depth + 2, 12), schedule.horizon, **style
        )
        assert predictor.ratio(deeper) <= speedup * 1.03 or schedule.min_depth >= 11
    assert predictor.ratios(schedule)[clock] == predictor.ratio(schedule)


def test_a_refusal_says_what_holds_it_back() -> None:
    """Its shares add up, and another depth for the prompt is offered where that helps."""
    predictor = Predictor(made(prompt=1e-3), [Workload(1, 128, 16)], "job")
    with pytest.raises(ScheduleError, match="the prompt 9") as refusal:
        plan(predictor, 5)
    assert "with prompt_layers='max' at most" in str(refusal.value)
    assert "the head" in str(refusal.value)


@pytest.mark.parametrize("in_prompt", ["max", 6, 3])
def test_whole_layers_far_apart_are_had_all_the_same(in_prompt: int | str) -> None:
    """Where no depths come near a target, the next faster ones are taken, whatever the prompt's budget."""
    predictor = Predictor(made(prompt=1e-3), [Workload(4, 128, 8)], "job")
    style = {"prompt_layers": in_prompt, "order": "bottom"}
    most = predictor.ratio(constant_schedules(12, **style)[0])
    for tenths in range(11, int(10 * most)):
        assert predictor.ratio(plan(predictor, tenths / 10, **style)) >= SHORT * tenths / 10


def test_between_measurements_costs_are_straight_lines() -> None:
    """Measured passes come back as they are; between them, lines; beyond what was measured, a refusal."""
    profile = made()
    for one in profile.steps:
        assert profile.step(one.batch_size, one.length) == one
    middle = profile.step(8, 64)
    assert middle.layers[0] == pytest.approx(0.001 + 1e-7 * 8 * 64)
    assert middle.rest + middle.head == pytest.approx(0.002 + 1e-5 * 8)
    for size, length in ((17, 64), (4, 641), (4, 0)):
        with pytest.raises(UsageError, match="the profile knows"):
            profile.step(size, length)


def test_beyond_measured_lengths_a_pass_costs_something() -> None:
    """A steep line through two lengths says nothing, or less, of a third one: it is never free, and never shrinks."""
    passes = (Pass(1, 100, (1e-3,), 0.001, 0.0), Pass(1, 101, (1.0,), 0.0, 0.0))
    profile = Profile("m", "s", "here", "float32", "cpu", ("k",), (0,), passes, passes)
    for length in (1, 50, 99, 126):
        one = profile.step(1, length)
        assert one.layers[0] >= 1e-3 * min(length / 100, 1)
        assert 0 <= one.rest <= 0.001 + 1e-12 or length < 100
    assert Predictor(profile, [Workload(1, 1, 9)]).ratio(Schedule.full(1)) == 1


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    """What is of another version or not ours is refused by name; what is there and not ours is kept."""
    path, profile = tmp_path / "profile.json", made()
    profile.save(path)
    profile.save(path)
    assert Profile.load(path) == profile
    path.write_text(json.dumps(json.loads(path.read_text()) | {"skipdecode_profile": 1}))
    with pytest.raises(FileError, match=r"profile\.json: this is no profile of version 2"):
        Profile.load(path)
    profile.save(path)  # which replaces one of another version
    path.write_text("{}")
    with pytest.raises(FileError):
        profile.save(path)
    assert path.read_text() == "{}"


#: What no field of a profile can be; ``False`` and ``True`` are no numbers, though Python counts with them.
NEVER: tuple[Any, ...] = (None, {}, math.nan, math.inf, -math.inf, -1, -1e-9, 1e308, 10**400, False, True)
NO_SIZES: tuple[Any, ...] = (0, 1.5, 1e3, "1", [], [1], 10**9)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each value of a JSON document stands, the containers too."""
    if path:
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def changed(values: dict[str, Any], path: tuple[Any, ...], new: Any) -> dict[str, Any]:
    """The document with one value replaced, or left out (``...``)."""
    values = deepcopy(values)
    holder: Any = values
    for key in path[:-1]:
        holder = holder[key]
    if new is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = new
    return values


@pytest.mark.parametrize("kinds", [1, 2])
def test_a_damaged_profile_decides_nothing(kinds: int) -> None:
    """Every value of a profile replaced by what it cannot be, and every field left out, is refused as damaged."""
    layers = tuple(i % kinds for i in range(12))
    values = json.loads(made(layers, weights=(0.001, 0.002)[:kinds], context=(1e-7, 2e-7)[:kinds]).to_json())
    for path in places(values):
        if path[0] == "options":
            continue
        wrong: tuple[Any, ...] = (*NEVER, ...) if isinstance(path[-1], str) and path[-1] != "noise" else NEVER
        if path[-1] in ("batch_size", "length"):
            wrong += NO_SIZES
        elif path[-1] in ("rest", "head", "noise"):
            wrong += ("1", [], [1])
        for new in wrong:
            with pytest.raises(FileError):
                Profile.from_dict(changed(values, path, new))


@settings(max_examples=200)
@given(st.data())
def test_any_value_in_a_profile_is_refused_or_planned_with(data: st.DataObject) -> None:
    """Whatever a field holds, there is an error of ours or a plan with finite ratios that fits the model."""
    values = json.loads(made().to_json())
    path = data.draw(st.sampled_from(list(places(values))))
    scalar = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
    new = data.draw(st.recursive(scalar, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner)))
    try:
        profile = Profile.from_dict(changed(values, path, new))
        predictor = Predictor(profile, [Workload(4, 32, 20)], "job")
        schedule = plan(predictor, 1.3)
    except SkipDecodeError:
        return
    assert schedule.num_layers == profile.num_layers
    assert all(0 < ratio < math.inf for ratio in predictor.ratios(schedule).values())


def test_a_profile_of_another_machine_model_or_type_is_refused() -> None:
    """The message says what differs."""
    profile = made()
    profile.check(machine="here", shape="0", dtype="float32")
    for name, other in {"machine": "there", "shape": "1", "dtype": "bfloat16"}.items():
        with pytest.raises(UsageError, match=name):
            profile.check(**{name: other})


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"new_tokens": 1}, {"prompt_tokens": -1}])
def test_a_workload_has_rows_and_steps(wrong: dict[str, int]) -> None:
    """A job without a decode step has no step to speed up."""
    with pytest.raises(SkipDecodeError):
        Workload(**{"batch_size": 1, "prompt_tokens": 1, "new_tokens": 2} | wrong)


def test_batches_are_cut_from_the_longest_prompt_on() -> None:
    """Each is padded to its longest; the last, smaller one counts only where there is no other."""
    assert workloads([3, 9, 5, 7, 1], 2, 4) == [Workload(2, 9, 4), Workload(2, 5, 4)]
    assert workloads([3, 5], 8, 4) == [Workload(2, 5, 4)]


def test_a_predictor_needs_work_and_a_clock_of_seconds() -> None:
    """Layers are counted without a profile."""
    for works, clock in (([], "step"), ([Workload(1, 8, 8)], CLOCKS[0]), ([Workload(1, 8, 8)], "wall")):
        with pytest.raises(UsageError):
            Predictor(made(), works, clock)
    assert Predictor(made(), [Workload(1, 8, n) for n in range(2, 12)]).typical == 10  # nine of ten are shorter


@pytest.mark.parametrize("clock", CLOCKS[1:])
def test_a_plan_is_a_falling_schedule_just_above_its_target(clock: str) -> None:
    """It surpasses its target by 2% at most; 1x is the original model, and below it there is nothing to plan."""
    predictor = Predictor(made(), [Workload(4, 32, 64)], clock)
    flattest = constant_schedules(12)[0]
    for tenths in range(11, 31):
        schedule = plan(predictor, tenths / 10)
        assert 0.999 < predictor.ratio(schedule) / (tenths / 10) < 1.02
        assert schedule.max_depth > schedule.min_depth
    assert plan(predictor, 1) == Schedule.full(12)
    assert plan(predictor, predictor.ratio(flattest)) == flattest
    assert plan(predictor, predictor.ratio(flattest) / SHORT * 0.999) == flattest
    for wrong in (0.5, 0, -1, math.nan):
        with pytest.raises(ScheduleError, match="at least 1"):
            plan(predictor, wrong)


def test_what_a_predictor_answered_before_changes_nothing() -> None:
    """Prompts of one schedule are not taken for those of another."""
    profile, works = made(prompt=1e-3), [Workload(2, 30, 6)]
    predictor = Predictor(profile, works, "job")
    styles: list[dict[str, Any]] = [{}, {"prompt_layers": "max"}, {"prompt_decay": 5}, {"prompt_decay": 9}]
    for style in styles:
        for most in (12, 9, 5):
            schedule = Schedule(12, most, 3, 8, **style)
            assert predictor.seconds(schedule) == Predictor(profile, works, "job").seconds(schedule)


def test_a_refusal_names_the_largest_share_first() -> None:
    """Only where the prompt counts, and its depth was left open, is another depth for the prompt offered."""
    profile, works = made(prompt=1e-3), [Workload(1, 128, 16)]
    job, step = Predictor(profile, works, "job"), Predictor(profile, works, "step")
    at_max = job.ratio(constant_schedules(12, prompt_layers="max")[0])
    offers = []
    for predictor, style in ((job, {}), (step, {}), (job, {"prompt_layers": "max"}), (step, {"prompt_layers": "max"})):
        with pytest.raises(ScheduleError) as refusal:
            plan(predictor, 100, **style)
        shares = [int(share) for share in re.findall(r"(\d+)%", str(refusal.value))]
        assert shares == sorted(shares, reverse=True)
        assert abs(sum(shares) - 100) <= 2
        assert len(shares) == (4 if predictor is job else 3)
        offers.append(re.findall(r"with prompt_layers='max' at most ([\d.]+)x", str(refusal.value)))
    assert offers == [[f"{at_max:.2f}"], [], [], []]


def test_what_cannot_have_been_measured_is_refused() -> None:
    """By the values themselves, before a file or a plan; the bounds belong to what can be."""
    profile = made()
    one = profile.steps[0]
    two_kinds = replace(one, layers=(0.1, 0.1))
    assert Pass(1, 1, (), 86_400.0, 0.0).rest == 86_400
    assert Pass(1, 1, (0.0,), 0.0, 1e-9).head == 1e-9
    assert replace(profile, noise=1000.0).noise == 1000
    assert replace(profile, noise=0).warning is None
    no_passes: list[dict[str, Any]] = [{"batch_size": 0}, {"length": 0}, {"rest": 86_400.5}, {"head": -1e-9}]
    no_passes += [{"rest": True}, {"rest": "1"}]
    no_passes += [{"layers": (0.0,), "rest": 0.0, "head": head} for head in (0.0, 9e-10)]
    for fields in no_passes:
        with pytest.raises(SkipDecodeError):
            replace(one, **fields)
    no_profiles: list[dict[str, Any]] = [{name: 1} for name in ("model", "shape", "machine", "dtype", "device")]
    no_profiles += [{"kinds": (1,)}] + [{"layers": layers} for layers in ((), (0,) * 20_000, (1,), (-1,))]
    no_profiles += [{"steps": steps} for steps in ((), (one, one), (two_kinds,), (*profile.steps[1:], two_kinds))]
    no_profiles += [{"prompts": ()}] + [{"noise": noise} for noise in (1000.5, -0.5, "0")]
    for fields in no_profiles:
        with pytest.raises(SkipDecodeError):
            replace(profile, **fields)
    no_files: list[Any] = [[], 1, None, "profile", {"skipdecode_profile": 1}, {"skipdecode_profile": 2}]
    for values in no_files:
        with pytest.raises(FileError):
            Profile.from_dict(values)


def test_rounds_that_differ_by_more_than_a_tenth_are_said() -> None:
    """With the share by which they differ."""
    profile = made()
    assert profile.warning is replace(profile, noise=0.1).warning is None
    assert "by 11%" in (replace(profile, noise=0.11).warning or "")


def test_a_profile_for_something_else_says_for_what() -> None:
    """Both sides are named; other weights of the same shape are called by the model's name."""
    profile = replace(made(), options={"attn_implementation": "eager"})
    with pytest.raises(UsageError, match="another shape: made, not this model"):
        profile.check(shape="1")
    with pytest.raises(UsageError, match="another machine: here, not there"):
        profile.check(machine="there")
    with pytest.raises(UsageError, match=r"another options: \{'attn_implementation': 'eager'\}, not none"):
        profile.check(options={})
    with pytest.raises(UsageError, match=r"another options: none, not \{'int8': True\}"):
        made().check(options={"int8": True})


def test_a_pass_lies_between_its_nearest_measurements() -> None:
    """Batch sizes and lengths farther away do not count; a quarter beyond the longest length is the end."""
    cost = {1: 1.0, 4: 10.0, 16: 1000.0}
    passes = [Pass(size, n, (cost[size] * n,), 0.0, 0.0) for size in cost for n in (LENGTHS if size < 16 else (16, 64))]
    profile = replace(made(), prompts=tuple(passes), steps=tuple(passes))
    assert profile.step(2, 16).layers[0] == pytest.approx(16 * (1 + 9 / 3))
    assert profile.step(10, 16).layers[0] == pytest.approx(16 * (10 + 990 / 2))
    assert profile.prompt(1, 640).layers[0] == pytest.approx(640)
    with pytest.raises(UsageError, match="up to 640 positions"):
        profile.prompt(1, 641)


def test_lengths_lie_on_lines_between_neighbours_and_beyond() -> None:
    """Through each measured point; below the first at least in proportion, beyond the last never less than there."""
    cost = {10: 2.0, 20: 3.0, 40: 9.0, 80: 10.0}
    passes = tuple(Pass(1, length, (seconds,), 0.0, 0.0) for length, seconds in cost.items())
    profile = replace(made(), prompts=passes, steps=passes)
    found = {length: profile.step(1, length).layers[0] for length in (*cost, 1, 15, 30, 60, 100)}
    assert found == pytest.approx(cost | {1: 1.1, 15: 2.5, 30: 6.0, 60: 9.5, 100: 10.5})
    steep = replace(made(), steps=(Pass(1, 10, (1.0,), 0.0, 0.0), Pass(1, 20, (9.0,), 0.0, 0.0)))
    assert steep.step(1, 5).layers[0] == pytest.approx(0.5)
    falling = replace(made(), steps=(Pass(1, 10, (9.0,), 0.0, 0.0), Pass(1, 20, (1.0,), 0.0, 0.0)))
    assert falling.step(1, 25).layers[0] == pytest.approx(1.0)
    low = replace(made(), steps=(*falling.steps, Pass(1, 40, (0.5,), 0.0, 0.0)))
    assert low.step(1, 50).layers[0] == pytest.approx(0.5)
    alone = replace(made(), steps=(Pass(1, 10, (9.0,), 0.0, 0.0), Pass(4, 10, (1.0,), 0.0, 0.0)))
    assert alone.step(1, 12).layers[0] == pytest.approx(9.0)


def test_a_dtype_left_to_the_checkpoint_is_compared_with_the_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the CPU multiplies bfloat16 in hardware, a bfloat16 model runs as it is."""
    monkeypatch.setattr(device, "_fast_bfloat16", lambda: True)
    config = LlamaConfig(dtype="bfloat16")
    here = replace(made(), shape=shape_of(config), machine=device.machine("cpu"), dtype="bfloat16")
    check_profile(here, config, device="cpu")
    with pytest.raises(UsageError, match="another dtype: float32, not bfloat16"):
        check_profile(replace(here, dtype="float32"), config, device="cpu")
