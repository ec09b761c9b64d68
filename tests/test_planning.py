"""The cost model and the planner: predictions are sums of what is measured, a speed-up is had or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipdecode import Schedule, ScheduleError
from skipdecode.clock.least_squares import left_out, off_the_line, split
from skipdecode.errors import FileError, SkipDecodeError, UsageError
from skipdecode.planning.kv_bytes import LayerKV
from skipdecode.planning.planner import SHORT, Predictor, Workload, fastest_schedule, plan, predict
from skipdecode.planning.profile import Pass, Profile

SIZES, LENGTHS = (1, 4, 16), (16, 128, 512)


def made(
    layers: tuple[int, ...] = (0,) * 12,
    beyond: float = 0.002,
    weights: tuple[float, ...] = (0.001,),
    context: tuple[float, ...] = (1e-7,),
    prompt: float = 1e-5,
) -> Profile:
    """A machine whose costs are known: steps and prompts are straight lines in the batch size and the length."""

    def step(size: int, length: int) -> Pass:
        costs = tuple(w + c * size * length for w, c in zip(weights, context, strict=True))
        return Pass(size, length, beyond + 1e-5 * size, costs)

    def prefill(size: int, length: int) -> Pass:
        return Pass(size, length, beyond, tuple(w + prompt * size * length for w in weights))

    cells = [(size, length) for size in SIZES for length in LENGTHS]
    return Profile(
        model="made",
        shape="0",
        machine="here",
        dtype="float32",
        device="cpu",
        kinds=tuple(f"kind {k}" for k in range(len(weights))),
        layers=layers,
        prompts=tuple(prefill(*cell) for cell in cells),
        steps=tuple(step(*cell) for cell in cells),
        head={1: 0.5},
        kv_bytes=(LayerKV(fixed=16.0, per_position=8.0),) * len(layers),
    )


def summed(profile: Profile, schedule: Schedule, work: Workload) -> tuple[float, float]:
    """Seconds of the prompt and of all decode steps, layer by layer and step by step."""
    prompt = profile.prompt(work.batch_size, work.prompt_tokens).beyond
    for layer, count in enumerate(schedule.positions_per_layer(work.prompt_tokens, work.prompt_tokens)):
        prompt += profile.prompt(work.batch_size, count).layers[profile.layers[layer]] if count else 0
    steps = 0.0
    for g in range(work.steps):
        one = profile.step(work.batch_size, work.prompt_tokens + g + 1)
        steps += one.beyond + sum(one.layers[profile.layers[i]] for i in schedule.layers(schedule.depth(g)))
    return prompt, steps


@st.composite
def cases(draw: st.DrawFn) -> tuple[Profile, list[Workload], dict[str, Any]]:
    """A machine with one or two kinds of layers, batches, and a form."""
    two = draw(st.booleans())
    cost = st.floats(1e-4, 5e-3)
    profile = made(
        layers=tuple(draw(st.lists(st.integers(0, int(two)), min_size=12, max_size=12))),
        beyond=draw(st.floats(0, 0.02)),
        weights=tuple(draw(cost) for _ in range(1 + two)),
        context=tuple(draw(st.floats(0, 1e-6)) for _ in range(1 + two)),
        prompt=draw(st.floats(1e-6, 1e-4)),
    )
    works = [Workload(draw(st.integers(1, 16)), draw(st.integers(1, 200)), draw(st.integers(2, 60))) for _ in range(2)]
    style: dict[str, Any] = {"order": draw(st.sampled_from(["top", "bottom", "even"]))}
    style |= draw(st.sampled_from([{}, {"prompt_layers": "max"}, {"decay": "constant"}, {"prompt_decay": 5}]))
    return profile, works, style


@settings(max_examples=40, deadline=None)
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


@settings(max_examples=60, deadline=None)
@given(cases(), st.floats(1, 12), st.sampled_from(["step", "job"]))
def test_a_speedup_is_had_or_refused(
    case: tuple[Profile, list[Workload], dict[str, Any]], speedup: float, clock: str
) -> None:
    """Nothing planned is slower than asked by more than 2%; a refusal is right, and says the most that can be had."""
    profile, works, style = case
    predictor = Predictor(profile, works, clock)
    most = predictor.ratio(fastest_schedule(12, **style))
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
    found = predict(predictor, speedup, schedule)
    assert {"step": found.step, "job": found.job}[clock] == pytest.approx(predictor.ratio(schedule))
    assert found.kv_bytes >= 0


def test_the_kept_bytes_are_the_most_of_any_step() -> None:
    """Bytes grow with the text and fall with the depth: the greatest sum over layers of any step."""
    predictor = Predictor(made(), [Workload(4, 32, 50)])
    schedule = Schedule(12, 9, 3, 30)
    running = [4 * schedule.depth(g) * (16.0 + 8.0 * (32 + g + 1)) for g in range(49)]
    kept = [4 * schedule.depth(g + 1) * (16.0 + 8.0 * (32 + g + 1)) for g in range(49)]
    assert max(kept) <= predictor.kv_bytes(schedule) <= max(running)


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
    most = predictor.ratio(fastest_schedule(12, **style))
    for tenths in range(11, int(10 * most)):
        assert predictor.ratio(plan(predictor, tenths / 10, **style)) >= SHORT * tenths / 10


def test_between_measurements_costs_are_straight_lines() -> None:
    """Measured passes come back as they are; between them, lines; beyond what was measured, a refusal."""
    profile = made()
    for one in profile.steps:
        assert profile.step(one.batch_size, one.length) == one
    middle = profile.step(8, 64)
    assert middle.layers[0] == pytest.approx(0.001 + 1e-7 * 8 * 64)
    assert middle.beyond == pytest.approx(0.002 + 1e-5 * 8)
    for size, length in ((17, 64), (4, 641), (4, 0)):
        with pytest.raises(UsageError, match="the profile knows"):
            profile.step(size, length)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    """What is damaged, of another version or not ours is refused by name; what is there and not ours is kept."""
    path, profile = tmp_path / "profile.json", made()
    profile.save(path)
    profile.save(path)
    assert Profile.load(path) == profile
    values = json.loads(path.read_text())
    changes: list[dict[str, Any]] = [
        {"skipdecode_profile": 2},
        {"steps": []},
        {"steps": [{"batch_size": 1}]},
        {"layers": [0, 7]},
        {"head": 3},
        {"layers": [0, -1]},
        {"kv_bytes": [[1, 2], [3, 4]]},
        {"kv_bytes": [{"fixed": 1}]},
        {"kv_bytes": 3},
        {"peaks": {"bandwidth": 0}},
        {"peaks": 3},
        {"error": 3},
        {"kinds": None},
    ]
    for change in changes:
        path.write_text(json.dumps(values | change))
        with pytest.raises(FileError, match=r"profile\.json"):
            Profile.load(path)
    earlier = {name: value for name, value in values.items() if name != "peaks"}
    path.write_text(json.dumps(earlier | {"kv_bytes": [[16, 8]] * len(profile.kinds)}))
    assert Profile.load(path) == profile  # bytes by kind, and no peaks
    path.write_text("{}")
    with pytest.raises(FileError):
        profile.save(path)
    assert path.read_text() == "{}"


def test_a_profile_of_another_machine_model_or_type_is_refused() -> None:
    """The message says what differs."""
    profile = made()
    profile.check(machine="here", shape="0", dtype="float32")
    for name, other in {"machine": "there", "shape": "1", "dtype": "bfloat16"}.items():
        with pytest.raises(UsageError, match=name):
            profile.check(**{name: other})


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(1e-4, 1e-1), min_size=2, max_size=4), st.data())
def test_costs_are_found_again_in_times(costs: list[float], data: st.DataObject) -> None:
    """Times made of a cost beyond layers and one of each kind give these costs back, and nothing is off."""
    kinds = len(costs) - 1
    counts = [tuple(int(k == kind) * 6 for k in range(kinds)) for kind in range(kinds)]
    counts += [(n,) * kinds for n in (1, 2, 5)]
    rows = [(each, costs[0] + sum(n * c for n, c in zip(each, costs[1:], strict=True))) for each in counts]
    rows = data.draw(st.permutations(rows))
    (found, again), off = split(1, {5: rows, 9: [(each, 2 * took - costs[0]) for each, took in rows]})
    assert [found.beyond, *found.layers] == pytest.approx(costs, rel=1e-6)
    assert [again.beyond, *again.layers] == pytest.approx([costs[0], *(2 * each for each in costs[1:])], rel=1e-6)
    assert off == pytest.approx([0.0] * len(off), abs=1e-6)


def test_what_noise_makes_negative_is_nothing() -> None:
    """Then the other costs are fitted without it: full depth is what was measured."""
    rows = [((n,), 0.010 * n - 0.004) for n in (2, 4, 8)]
    (found,), _ = split(1, {1: rows})
    assert found.beyond == 0
    assert found.layers[0] * 8 == pytest.approx(rows[-1][1], rel=0.1)


def test_noise_is_reported() -> None:
    """One time that the others contradict shows in the error, and so does a length off its neighbours' line."""
    rows = [((n,), 0.01 + 0.002 * n) for n in (1, 2, 4, 8)]
    assert max(left_out(rows)) < 1e-9
    assert np.mean(left_out([*rows[:-1], ((8,), 0.05)])) > 0.1
    profile = made()
    assert off_the_line(profile, "steps") == pytest.approx(0, abs=1e-9)
    bent = replace(profile.steps[1], beyond=1.0)
    off = off_the_line(replace(profile, steps=(profile.steps[0], bent, *profile.steps[2:])), "steps")
    assert off is not None
    assert off > 0.1


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"new_tokens": 1}, {"prompt_tokens": -1}])
def test_a_workload_has_rows_and_steps(wrong: dict[str, int]) -> None:
    """A job without a decode step has no step to speed up."""
    with pytest.raises(SkipDecodeError):
        Workload(**wrong)
