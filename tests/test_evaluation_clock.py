"""Evaluation of faster layers, and calibration to speed-ups of the clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.profiles import profile_of
from helpers.tiny import run, write_examples
from skipdecode import Schedule
from skipdecode.errors import SkipDecodeError
from skipdecode.evaluation import evaluate as evaluation
from skipdecode.evaluation.calibration import CalibrationPlan, calibrate
from skipdecode.evaluation.evaluate import EvaluationPlan, evaluate
from skipdecode.loading.load import load

FEW: dict[str, Any] = {"max_new_tokens": 9, "batch_size": 4, "timing_rows": 8, "repeats": 1}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Prompts with responses."""
    return write_examples(tmp_path / "rows.jsonl")


def test_what_makes_layers_faster_holds_for_every_row_and_is_said(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full model's too: like is compared with like. Without it the rows are other rows."""
    loaded: list[dict[str, Any]] = []

    def spied(*args: Any, **kwargs: Any) -> Any:
        loaded.append(kwargs)
        return load(*args, **kwargs)

    monkeypatch.setattr(evaluation, "load", spied)
    given: dict[str, Any] = {"speedups": (2,), "output": tmp_path / "out", **FEW}
    faster = {"prepack": True}
    results = evaluate(EvaluationPlan(str(checkpoint), data, faster=faster, **given), say=lambda _: None)
    assert loaded
    assert all(options["prepack"] for options in loaded)
    assert results.about["made faster"] == "{'prepack': True}"
    with pytest.raises(SkipDecodeError, match="other settings"):
        evaluate(EvaluationPlan(str(checkpoint), data, **given), say=lambda _: None)


@pytest.mark.parametrize(
    ("faster", "says"),
    [({"quantization": "int3"}, "quantization is int8"), ({"quantization": "int8", "prepack": True}, "leave one of")],
)
def test_refused_before_weights_are_read(
    checkpoint: Path, data: Path, tmp_path: Path, faster: dict[str, Any], says: str
) -> None:
    """What cannot be had is said first."""
    with pytest.raises(SkipDecodeError, match=says):
        evaluate(EvaluationPlan(str(checkpoint), data, faster=faster, output=tmp_path), say=lambda _: None)
    assert not list(tmp_path.glob("rows/*.json"))


def test_calibrate_fits_what_the_profile_predicts(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """A profile of any dtype and options will do: they are those of the jobs to come. All else is this machine's."""
    profile = replace(profile_of(checkpoint, prepack=True), dtype="bfloat16")
    plan = CalibrationPlan(
        str(checkpoint), data, 1.5, batch_size=8, max_new_tokens=9, clock="step", profile=profile, output=tmp_path / "s"
    )
    result = calibrate(plan, say=lambda _: None)
    # Half of a step's seconds lies beyond the layers: 1.5x of the clock takes 3x of the layers.
    assert result.after.ratio == pytest.approx(1.5, rel=0.1)
    assert result.after.step_layer_ratio > 2
    assert Schedule.load(tmp_path / "s") == result.schedule
    with pytest.raises(SkipDecodeError, match="another machine"):
        calibrate(replace(plan, profile=replace(profile, machine="elsewhere")), say=lambda _: None)


def test_a_clock_needs_a_profile(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """Exit code 2, and how to get one."""
    done = run("calibrate", checkpoint, "--data", data, "--clock", "job", "--output", tmp_path / "s")
    assert done.returncode == 2
    assert "--profile FILE" in done.stderr
