"""The planner: predictions are sums of what is measured, and a speed-up is reached or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny import run
from skipdecode import Schedule, ScheduleError
from skipdecode.latency.planner import CLOSE, Workload, at_depth, constant_depths, plan, predict, to_measure
from skipdecode.latency.profile import Cell, Profile

LAYERS = 12


def machine(outside: float = 0.002, layer: float = 0.001, context: float = 1e-6, prompt: float = 1e-5) -> Profile:
    """A machine on which a layer costs as much as every other; two depths and two lengths are measured."""
    sizes = (1, 4)
    corners = [(size, length, depth) for size in sizes for length in (16, 600) for depth in (2, LAYERS)]
    steps = [Cell(s, n, d, outside + d * (layer + context * s * n)) for s, n, d in corners]
    prompts = [Cell(s, n, d, outside + d * prompt * s * n) for s, n, d in corners]
    return Profile("made", "here", prompts=prompts, steps=steps)


SCHEDULES = [
    Schedule(LAYERS, 9, 4, 20),
    Schedule(LAYERS, 5, 5, 1, order="even"),
    Schedule(LAYERS, 6, 3, 30, decay="cosine", prompt_layers="max"),
    Schedule(LAYERS, 8, 2, 10, prompt_decay=5),
]


@pytest.mark.parametrize("schedule", [*SCHEDULES, Schedule.full(LAYERS)], ids=str)
@pytest.mark.parametrize("size", [1, 4])
def test_a_prediction_is_the_sum_of_its_steps(schedule: Schedule, size: int) -> None:
    """Layer by layer and position by position."""
    work = Workload(size, 40, 60)
    positions = schedule.positions_per_layer(40, 40)
    prompt = 0.002 + sum(1e-5 * size * count for count in positions)
    steps = [0.002 + schedule.depth(g) * (0.001 + 1e-6 * size * (41 + g)) for g in range(59)]
    found = predict(machine(), schedule, work)
    assert found.seconds == pytest.approx(prompt + sum(steps), rel=1e-6)
    assert found.step_seconds == pytest.approx(sum(steps) / 59, rel=1e-6)
    assert found.layers == pytest.approx(schedule.average_depth(59))
    full = predict(machine(), Schedule.full(LAYERS), work)
    assert found.speedups["layers"] == pytest.approx(full.layers / found.layers)
    assert found.speedups["decoding"] == pytest.approx(full.step_seconds / found.step_seconds)
    assert found.speedups["end-to-end"] == pytest.approx(full.seconds / found.seconds)


def test_long_texts_are_predicted_from_some_of_their_steps() -> None:
    schedule, work = Schedule(LAYERS, 9, 4, 20), Workload(1, 16, 2000)
    steps = [0.002 + schedule.depth(g) * (0.001 + 1e-6 * (17 + g)) for g in range(1999)]
    assert predict(machine(), schedule, work).step_seconds == pytest.approx(sum(steps) / 1999, rel=0.02)


@pytest.mark.parametrize("count", ["layers", "decoding", "end-to-end"])
@pytest.mark.parametrize("prompt_layers", [None, "max"])
def test_a_speedup_is_reached_by_the_deepest_schedule_that_does(count: str, prompt_layers: str | None) -> None:
    """A refusal names the highest speed-up."""
    work, profile = Workload(4, 64, 64), machine()
    style = Schedule(LAYERS, 6, 6, 1, prompt_layers=prompt_layers)
    candidates = constant_depths(style)
    assert [each.max_depth for each in candidates] == [*range(LAYERS, 0, -1)]
    most = max(predict(profile, each, work).speedups[count] for each in candidates)
    for tenths in range(10, 140, 7):
        speedup = tenths / 10
        if speedup * CLOSE > most:
            with pytest.raises(ScheduleError, match=f"at most {most:.2f}x"):
                plan(profile, work, speedup, candidates, count)
            continue
        found = plan(profile, work, speedup, candidates, count)
        assert found.speedups[count] >= CLOSE * speedup
        if not found.schedule.is_full:
            deeper = predict(profile, at_depth(style, found.schedule.max_depth + 1), work)
            assert deeper.speedups[count] < CLOSE * speedup


def test_few_depths_stand_for_all() -> None:
    """Full, shallowest, middle and deepest; with the schedule's own order, and its rule for the prompt."""
    few = to_measure([Schedule(LAYERS, 9, 2, 20, order="even", prompt_layers="max")])
    assert [(each.max_depth, each.order) for each in few[1:]] == [(2, "even"), (6, "even"), (9, "even")]
    assert [each.prompt_layers for each in few[1:]] == [2, 6, 9]
    assert few[0].is_full
    assert to_measure([Schedule.full(LAYERS)]) == [Schedule.full(LAYERS)]


# --- the verb


def planned(*arguments: object) -> dict[str, Any]:
    done = run("plan", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


WORK = ("--batch-size", 1, "--prompt-tokens", 8, "--new-tokens", 16)


def test_a_machine_is_measured_once(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And then remembered, in the user's cache folder or in a file; another prompt length is measured too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = planned(checkpoint, *WORK, "--speedups", "2,4")
    (path,) = tmp_path.glob("skipdecode/profiles/*.json")
    before = path.read_bytes()
    assert planned(checkpoint, *WORK, "--speedups", "2,4") == first
    assert path.read_bytes() == before
    full, two, four = first["rows"]
    assert (full["requested"], full["layers"], two["layers"], four["layers"]) == (1, 8, 4, 2)
    assert full["decoding_speedup"] == full["end_to_end_speedup"] == 1
    measured = Profile.load(path)
    elsewhere = Profile("m", "another machine", prompts=measured.prompts, steps=measured.steps)
    elsewhere.save(tmp_path / "there.json")
    there = ("--profile", tmp_path / "there.json", "--speedups", "2,4")
    assert planned(checkpoint, *WORK, *there)["rows"] == first["rows"]
    done = run("plan", checkpoint, *WORK, *there, "--batch-size", 2)
    assert done.returncode == 2
    assert "no batch size 2" in done.stderr
    planned(checkpoint, *WORK, "--prompt-tokens", 30, "--speedups", "2")
    assert path.read_bytes() != before


def test_a_speedup_in_seconds_is_planned_or_out_of_reach(checkpoint: Path, tmp_path: Path) -> None:
    cells = [Cell(1, length, depth, 0.001 + 0.001 * depth) for length in (8, 12, 16) for depth in (1, 5, 8)]
    machine_file = tmp_path / "p.json"
    Profile("m", "there", prompts=cells, steps=cells).save(machine_file)
    rows = planned(checkpoint, *WORK, "--profile", machine_file, "--count", "decoding", "--speedups", "1.5,3,9")["rows"]
    assert [row.get("layers") for row in rows] == [8, 5, 2, None]
    assert "at most 4.50x" in rows[3]["refused"]
