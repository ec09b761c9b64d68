"""Evaluation of faster layers, and of speed-ups that are of the clock."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny import EXAMPLES, run, write_examples
from skipdecode.data.tokenization import encode_prompts
from skipdecode.errors import ScheduleError, SkipDecodeError
from skipdecode.evaluation import runner
from skipdecode.evaluation.calibration_plan import CalibrationPlan, check
from skipdecode.evaluation.evaluate import EvaluationPlan, evaluate
from skipdecode.planning.planner import Predictor, plan, workloads
from skipdecode.planning.profile import Pass, Profile, shape_of
from skipdecode.weights.device import machine
from skipdecode.weights.loading import load, load_tokenizer, read_config
from skipdecode.weights.prepack import PackedLinear

FEW: dict[str, Any] = {"max_new_tokens": 9, "batch_size": 4, "timing_rows": 8, "repeats": 1, "samples": 20}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Prompts with responses."""
    return write_examples(tmp_path / "rows.jsonl")


def profile_of(checkpoint: Path, **options: Any) -> Profile:
    """Of eight layers that take as long as all that is beyond them."""
    passes = tuple(Pass(size, length, (0.00125,), 0.01) for size in (1, 8) for length in (4, 90))
    placed: dict[str, Any] = {"shape": shape_of(read_config(str(checkpoint))), "machine": machine("cpu")}
    placed |= {"model": "made", "dtype": "float32", "device": "cpu", "options": options}
    return Profile(**placed, kinds=("layer",), layers=(0,) * 8, prompts=passes, steps=passes)


@pytest.mark.slow
def test_targets_of_the_clock_are_planned_for_the_timed_runs(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row's schedule is the one that the profile gives for its timed steps, with faster layers for every model."""
    profile, loaded = profile_of(checkpoint, prepack=True), []

    def spied(*args: Any, **kwargs: Any) -> Any:
        loaded.append(load(*args, **kwargs))
        return loaded[-1]

    monkeypatch.setattr(runner, "load", spied)
    given: dict[str, Any] = {"speedups": (1.5,), "methods": "skipdecode,multi_exit", "clock": "step", **FEW}
    output = tmp_path / "out"
    wanted = EvaluationPlan(str(checkpoint), data, faster={"prepack": True}, profile=profile, output=output, **given)
    results = evaluate(wanted, say=lambda _: None)
    full, *rows = results.rows
    assert isinstance(loaded[0][0].get_output_embeddings(), PackedLinear)
    prompts = [example.prompt for example in EXAMPLES][:8]
    lengths = [len(ids) for ids in encode_prompts(load_tokenizer(str(checkpoint)), prompts)]
    predictor = Predictor(profile, workloads(lengths, 4, full["timed_steps"] + 1), "step")
    for row, (order, target) in zip(rows, [(o, 1.5) for o in ("top", "bottom")], strict=True):
        assert row["schedule"] == plan(predictor, target, order=order).to_dict()
        assert (row["target"], row["target_of"]) == (target, "step")
    assert results.about["made faster"] == "{'prepack': True}"
    assert "of a step's seconds" in results.about["targets"]
    # Another profile makes other rows.
    with pytest.raises(SkipDecodeError, match="other settings"):
        evaluate(
            EvaluationPlan(str(checkpoint), data, output=output, **given | {"clock": "layers"}), say=lambda _: None
        )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"clock": "job"}, "need a profile"),
        ({"profile": "p.json"}, "need a profile"),
        ({"clock": "job", "profile": "p.json", "methods": "unified"}, "none can be planned on the clock"),
        ({"clock": "job", "profile": "p.json", "speedups": (1.2, 4)}, "4x of a job cannot be had"),
        ({"clock": "job", "profile": "p.json", "dtype": "bfloat16"}, "another dtype"),
        ({"clock": "job", "profile": "p.json", "faster": {"prepack": True}}, "another options"),
        ({"faster": {"quantization": "int3"}}, "quantization is int8"),
        ({"faster": {"int8": True}}, "not by int8"),
        ({"clock": "job", "profile": "p.json", "serving": True}, "flat schedules for speed-ups of layers"),
    ],
)
def test_refused_before_weights_are_read(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], says: str
) -> None:
    """What cannot be had, or not together, is said first."""
    monkeypatch.chdir(tmp_path)
    profile_of(checkpoint).save("p.json")
    with pytest.raises(SkipDecodeError, match=says):
        evaluate(EvaluationPlan(str(checkpoint), data, **{"speedups": (1.2,)} | FEW | given), say=lambda _: None)
    assert not list(tmp_path.glob("evaluation/rows/*.json"))


def test_what_short_texts_cannot_have_is_said_before_the_rows_that_can(
    checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    """1.5x of a job can be had over texts of nine tokens, but these end after one: one row is all there is."""
    ends = shutil.copytree(checkpoint, tmp_path / "ends")
    config = json.loads((ends / "generation_config.json").read_text())
    (ends / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": list(range(20, 300))}))
    given = {**FEW, "speedups": (1.2, 1.5), "clock": "job", "profile": profile_of(ends), "output": tmp_path / "out"}
    with pytest.raises(ScheduleError, match=r"1\.5x of a job cannot be had"):
        evaluate(EvaluationPlan(str(ends), data, **given), say=lambda _: None)
    assert [path.name for path in tmp_path.glob("out/rows/*.json")] == ["full-1x.json"]


def test_calibrate_takes_a_profile_of_any_options(checkpoint: Path, data: Path) -> None:
    """It times nothing: the options are those of the jobs that the schedule is for. All else is this machine's."""
    config = read_config(str(checkpoint))
    profile = profile_of(checkpoint, prepack=True)
    plan = CalibrationPlan(str(checkpoint), data, clock="step", profile=profile)
    check(plan, config)
    with pytest.raises(SkipDecodeError, match="another dtype"):
        check(replace(plan, profile=replace(profile, dtype="bfloat16")), config)


def test_the_verb_takes_what_generate_takes(checkpoint: Path, data: Path) -> None:
    """The same names, with exit code 2 where they do not go together."""
    done = run("evaluate", checkpoint, "--data", data, "--clock", "job")
    assert done.returncode == 2
    assert "need a profile" in done.stderr
