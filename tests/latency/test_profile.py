"""Profiles: what the work takes is measured, and files bring it back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from helpers.families import build
from skipdecode import Schedule, attach, load
from skipdecode.errors import FileError
from skipdecode.latency.profile import STEPS, Cell, Profile, cache_path, predict_seconds, prompt_depth
from skipdecode.model.inspect import decoder_layers

LAYER, POSITION, HEAD = 0.01, 0.0001, 0.005


class WorkClock:
    """``time.perf_counter`` that moves by what attention layers and the head would take, and else stands still."""

    def __init__(self, model: Any) -> None:
        self.now = 0.0
        for layer in decoder_layers(model):
            attention: Any = layer.self_attn
            attention.register_forward_pre_hook(self.attend, with_kwargs=True)
        model.get_output_embeddings().register_forward_hook(self.head)

    def attend(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.now += LAYER + POSITION * hidden.shape[0] * hidden.shape[1]

    def head(self, module: nn.Module, args: Any, output: Any) -> None:
        self.now += HEAD

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model of eight layers that runs on a clock of its own work."""
    model = attach(build("llama"))
    model.generation_config.eos_token_id = None
    monkeypatch.setattr(time, "perf_counter", WorkClock(model))
    return model


def flat(depth: int, **fields: Any) -> Schedule:
    return Schedule(8, depth, depth, 1, decay="constant", **fields)


def test_a_profile_holds_what_the_work_takes(clocked: Any) -> None:
    """Of steps at each depth, and of prompts, whose layers a schedule may skip too; depths between are predicted."""
    _, tokenizer = load("demo")
    profile = Profile("made", "here")
    schedules = [Schedule.full(8), flat(2), flat(4, prompt_layers=4)]
    wanted = profile.missing([1, 3], [4, 24], schedules)
    assert len(wanted) == 12
    runs: list[int] = []
    profile.measure(clocked, tokenizer, wanted, rounds=1, on_run=lambda: runs.append(1))
    assert len(runs) == 12 * 2
    for size in (1, 3):
        for depth in (2, 3, 4, 6, 8):
            expected = depth * (LAYER + POSITION * size) + HEAD
            assert predict_seconds(profile.steps, size, 16, depth) == pytest.approx(expected)
        for length in (4, 10, 24):
            for depth in (4, 8):
                expected = depth * (LAYER + POSITION * size * length) + HEAD
                assert predict_seconds(profile.prompts, size, length, depth) == pytest.approx(expected)
    assert profile.missing([1, 3], [4, 24], schedules) == []
    assert [(size, length) for size, length, _ in profile.missing([3, 4], [24], schedules[:1])] == [(4, 24)]


def test_the_depth_of_a_prompt_is_that_of_its_positions() -> None:
    assert prompt_depth(flat(3), 10) == 8
    assert prompt_depth(flat(3, prompt_layers=5), 10) == 5
    falling = Schedule(8, 2, 2, 1, prompt_decay=4)
    assert prompt_depth(falling, 10) == pytest.approx((6 * 8 + 8 + 6 + 4 + 2) / 10)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    profile = Profile("m", "here", {"dtype": "auto"}, [Cell(1, 4, 8.0, 0.5)], [Cell(1, 4 + STEPS // 2, 2, 0.1)])
    path = tmp_path / "no" / "such" / "folder" / "p.json"
    profile.save(path)
    assert Profile.load(path) == profile
    for content in ("{}", '{"prompts": [], "steps": [{"x": 1}]}'):
        path.write_text(content)
        with pytest.raises(FileError, match="holds no profile"):
            Profile.load(path)


def test_all_that_decides_a_speed_names_the_file_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    facts = [{"machine": "here", "dtype": "auto"}, {"machine": "there", "dtype": "auto"}, {"machine": "here"}]
    paths = {cache_path("org/model", **each) for each in [*facts, *facts]}
    assert len(paths) == 3
    assert {path.parent for path in paths} == {tmp_path / "skipdecode" / "profiles"}
