"""Calibration keeps what was trained, says what it costs, and loses nothing."""

from __future__ import annotations

import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from helpers.tiny import TEXTS, run, save_checkpoint
from skipdecode import Schedule
from skipdecode.data.metrics import Agreement
from skipdecode.errors import FileError, UsageError
from skipdecode.evaluation import calibration
from skipdecode.evaluation.calibration import POINTS, CalibrationPlan
from skipdecode.latency.fitting import refit
from skipdecode.model import config as checkpoint_config


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of eight layers that was never trained to skip."""
    return save_checkpoint(tmp_path_factory.mktemp("eight"))


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of six layers."""
    return save_checkpoint(tmp_path_factory.mktemp("six"), layers=6)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows that have prompts and nothing else."""
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text[:9]}) + "\n" for text in TEXTS[:8]))
    return path


def trained_with(source: Path, folder: Path, schedules: dict[float, Schedule], method: str = "skipdecode") -> Path:
    """A copy of the checkpoint whose config says that it was trained with these."""
    shutil.copytree(source, folder)
    values = json.loads((folder / "config.json").read_text()) | {
        "skipdecode": checkpoint_config.to_config_entry(schedules, method)
    }
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def calibrate(model: Path, data: Path, folder: Path, *more: object, tokens: int = 24) -> Any:
    """The verb, its schedule beside the model."""
    common = ("--data", data, "--output", folder / "schedule.json", "--max-new-tokens", tokens, "--batch-size", 7)
    return run("calibrate", model, *common, "--json", *more)


@pytest.mark.parametrize(
    "plan",
    [
        Schedule(6, 3, 1, 44),
        Schedule(6, 3, 1, 44, order="bottom", decay="exponential", rate=2.0),
        Schedule(6, 3, 2, 20, order=(0, 5, 1, 4, 2, 3), decay="cosine", prompt_decay=3),
        Schedule(6, 4, 1, 20, warmup=0, decay="step", stairs=3),
        Schedule(6, 3, 1, 44, decay="power", prompt_layers="max"),
        Schedule(6, 3, 1, 44, decay="cosine", prompt_layers=5),
    ],
    ids=lambda plan: f"{plan.decay}-{plan.deepest}",
)
def test_what_was_trained_keeps_its_form_and_its_depths(
    six: Path, prompts: Path, tmp_path: Path, plan: Schedule
) -> None:
    """F3: the horizon moves, and only where none gives the ratio do the depths; then a line says so."""
    model = trained_with(six, tmp_path / "model", {3.0: plan})
    done = calibrate(model, prompts, tmp_path, "--speedup", 3, "--save", "--force")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    new = checkpoint_config.trained_schedules(AutoConfig.from_pretrained(model))[3.0]
    assert new == Schedule.load(tmp_path / "schedule.json") == Schedule.from_dict(found["schedule"])
    assert new.style == plan.style
    assert new.horizon > 1
    assert new.max_depth > new.min_depth
    moved = (new.max_depth, new.min_depth) != (plan.max_depth, plan.min_depth)
    assert moved == ("the depths moved" in done.stderr)
    assert not moved or refit(plan, 3, found["lengths"]) is None
    assert moved or new.deepest == plan.deepest


def test_another_speedup_takes_the_form_of_the_fastest_trained(six: Path, prompts: Path, tmp_path: Path) -> None:
    """F3: as every other verb does."""
    plan = Schedule(6, 3, 2, 20, order="bottom", decay="cosine", prompt_decay=3)
    model = trained_with(six, tmp_path / "model", {2.4: plan})
    assert calibrate(model, prompts, tmp_path, "--speedup", 2).returncode == 0
    assert Schedule.load(tmp_path / "schedule.json").style == plan.style
    assert calibrate(model, prompts, tmp_path, "--speedup", 2, "--order", "even", "--decay", "linear").returncode == 0
    assert Schedule.load(tmp_path / "schedule.json").style == plan.style | {"order": "even", "decay": "linear"}
    assert calibrate(model, prompts, tmp_path, "--speedup", 2, "--decay", "constant").returncode == 0
    assert Schedule.load(tmp_path / "schedule.json").max_depth == 3


def test_the_prompts_layers_are_set_and_measured(six: Path, prompts: Path, tmp_path: Path) -> None:
    """The step's ratio is what is fitted, whatever the prompt runs; the job's stands beside it."""
    found = {}
    for asked in (None, "max", 5):
        done = calibrate(six, prompts, tmp_path, "--speedup", 2, *(("--prompt-layers", asked) if asked else ()))
        assert done.returncode == 0, done.stderr
        found[asked] = json.loads(done.stdout.splitlines()[-1])
        schedule = Schedule.load(tmp_path / "schedule.json")
        assert schedule.deepest == (schedule.max_depth if asked == "max" else asked or 6)
        assert found[asked]["step_layer_ratio"] == pytest.approx(2, rel=0.03)
    jobs = [found[asked]["job_layer_ratio"] for asked in (None, 5, "max")]
    assert jobs == sorted(set(jobs))
    for asked, words in ((2, "runs more than 2 layers at a step"), ("low", "is 'max' or a number")):
        done = calibrate(six, prompts, tmp_path, "--speedup", 2, "--prompt-layers", asked)
        assert done.returncode == 2
        assert words in done.stderr


def test_what_fits_already_stays(six: Path, prompts: Path, tmp_path: Path) -> None:
    """Calibrated once, nothing is left to move."""
    assert calibrate(six, prompts, tmp_path, "--speedup", 2).returncode == 0
    first = Schedule.load(tmp_path / "schedule.json")
    model = trained_with(six, tmp_path / "model", {2.0: first})
    assert calibrate(model, prompts, tmp_path, "--speedup", 2).returncode == 0
    assert Schedule.load(tmp_path / "schedule.json") == first


def test_quality_stands_beside_the_ratio(eight: Path, prompts: Path, tmp_path: Path) -> None:
    """F3: prompts alone give agreement with full depth's texts; references give the task's scores as well."""
    done = calibrate(eight, prompts, tmp_path, "--speedup", 2)
    assert done.returncode == 0, done.stderr
    quality = json.loads(done.stdout.splitlines()[-1])["quality"]
    assert list(quality) == ["agreement with full depth"]
    assert quality["agreement with full depth"]["full"] == 100
    rows = [{"prompt": text[:9], **({"response": text[10:]} if i % 2 else {})} for i, text in enumerate(TEXTS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": ""}]))
    done = calibrate(eight, tmp_path / "rows.jsonl", tmp_path, "--speedup", 2)
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout.splitlines()[-1])["quality"]) == [
        "BLEU",
        "ROUGE-L",
        "agreement with full depth",
    ]
    assert "no prompt" in done.stderr  # the bad row is named
    for word in ("full depth", "before", "after", "BLEU"):
        assert word in done.stdout


def test_a_worse_schedule_is_saved_only_by_force(eight: Path, prompts: Path, tmp_path: Path) -> None:
    """F3: both numbers and the remedy in one line; the file is there for training with it."""
    model = trained_with(eight, tmp_path / "model", {4.0: Schedule(8, 8, 7, 200)})
    config = (model / "config.json").read_bytes()
    done = calibrate(model, prompts, tmp_path, "--speedup", 4, "--save")
    assert done.returncode == 2
    each = json.loads(done.stdout.splitlines()[-1])["quality"]["agreement with full depth"]
    assert each["before"] - each["after"] > POINTS
    last = done.stderr.splitlines()[-1]
    assert f"from {each['before']:.2f} to {each['after']:.2f}" in last
    assert "--force" in last
    assert (model / "config.json").read_bytes() == config
    plan = Schedule.load(tmp_path / "schedule.json")
    assert calibrate(model, prompts, tmp_path, "--speedup", 4, "--save", "--force").returncode == 0
    assert checkpoint_config.trained_schedules(AutoConfig.from_pretrained(model))[4.0] == plan


def test_scores_judge_where_there_are_references() -> None:
    """Agreement falls whenever a text changes, better ones too."""
    worse = calibration.Quality(90, 60, 60 - POINTS - 0.1, (-2, -0.2), 50)
    same = calibration.Quality(90, 60, 60 - POINTS, (-2, -0.2), 50)

    nothing = calibration.Written(Schedule.full(2), 1.0, 1.0, 1.0, (), ())

    def fallen(**quality: calibration.Quality) -> list[str]:
        plan = CalibrationPlan("m", Path("d"))
        return list(calibration.Calibration(plan, "skipdecode", nothing, nothing, nothing, quality).worse())

    assert fallen(BLEU=same, ROUGE=worse, agreement=worse) == ["ROUGE"]
    assert not fallen(BLEU=same, ROUGE=same, agreement=worse)
    assert fallen(agreement=worse) == ["agreement"]
    assert "chance" not in str(worse)
    # Too few rows, or an interval around nothing: said.
    for noise in (replace(worse, rows=4), replace(worse, interval=(-2, 0.3))):
        assert "may be chance" in str(noise)


def test_equal_texts_agree_whatever_their_script() -> None:
    """Empty ones and those without a Latin letter too, which ROUGE's own tokenizer does not see."""
    texts = ["", "猫が座った。", "the cat", "?!"]
    assert Agreement().score(texts, [[text] for text in texts]) == 100
    assert 0 < Agreement().score(["кот сидел"], [["кот лежал"]]) < 100
    assert Agreement().score([""], [["the cat"]]) == 0


def test_a_config_that_others_share_is_left_alone(tmp_path: Path) -> None:
    """A snapshot of the hub's cache links to the one file that every user of the model reads."""
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "config.json").symlink_to(tmp_path / "blob")
    with pytest.raises(FileError, match="copy the model first"):
        checkpoint_config.save_calibrated(tmp_path / "snapshot", 2, Schedule.full(4), "skipdecode")
    assert (tmp_path / "blob").read_text() == "{}"


def test_a_calibrated_model_is_not_a_trained_one(eight: Path, prompts: Path, tmp_path: Path) -> None:
    """F4: ``generate`` still says that it is untrained, and takes the calibrated schedule."""
    model = shutil.copytree(eight, tmp_path / "model")
    assert calibrate(model, prompts, tmp_path, "--speedup", 2, "--save", "--force").returncode == 0
    config = AutoConfig.from_pretrained(model)
    plan = Schedule.load(tmp_path / "schedule.json")
    assert checkpoint_config.trained_method(config) == "full"
    assert (
        checkpoint_config.trained_schedules(config)
        == checkpoint_config.schedules_of(config, "skipdecode")
        == {2.0: plan}
    )
    assert checkpoint_config.schedule_for(config, 2) == plan
    assert checkpoint_config.schedules_of(config, "unified") == {}
    done = run("generate", model, "--speedup", 2, "--max-new-tokens", 3, stdin=b"the cat\n")
    assert done.returncode == 0
    assert "not trained to skip layers" in done.stderr
    # Where it was trained, calibrating keeps that.
    model = trained_with(eight, tmp_path / "trained", {2.0: plan, 3.0: plan})
    assert calibrate(model, prompts, tmp_path, "--speedup", 3, "--save", "--force").returncode == 0
    assert checkpoint_config.trained_method(AutoConfig.from_pretrained(model)) == "skipdecode"


def test_schedules_saved_at_once_all_survive(eight: Path, tmp_path: Path) -> None:
    """F4: each takes the config as it is at that moment, and adds its own; what others put there stays."""
    model = trained_with(eight, tmp_path / "model", {2.0: Schedule(8, 5, 3, 40)})
    speedups = [2.5, 3.0, 3.123456789, 4.0, 5.0, 6.0]
    plans = {k: Schedule(8, 4, 1, 10 + i) for i, k in enumerate(speedups)}
    threads = [
        threading.Thread(target=checkpoint_config.save_calibrated, args=(model, k, plan, "skipdecode"))
        for k, plan in plans.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    config = AutoConfig.from_pretrained(model)
    assert checkpoint_config.trained_schedules(config) == plans | {2.0: Schedule(8, 5, 3, 40)}
    assert config.hidden_size == 32
    assert not [path for path in model.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_failing_disk_leaves_the_config_whole(
    eight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """F4, B9: full or read-only at the worst moment."""
    model = shutil.copytree(eight, tmp_path / "model")
    before = (model / "config.json").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, name, full)
        with pytest.raises(OSError, match="No space left"):
            checkpoint_config.save_calibrated(model, 2, Schedule(8, 5, 3, 40), "skipdecode")
    assert (model / "config.json").read_bytes() == before
    assert not [path for path in model.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("content", ["my notes", '{"a": 1}', "", "[" * 100_000])
def test_a_file_that_is_no_schedule_is_not_replaced(eight: Path, prompts: Path, tmp_path: Path, content: str) -> None:
    """F15: schedule.json is the default name, and may be anyone's; said before a model is loaded."""
    (tmp_path / "schedule.json").write_text(content)
    done = calibrate(eight, prompts, tmp_path, "--speedup", 2)
    assert done.returncode == 2
    assert "schedule.json" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "schedule.json").read_text() == content


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--speedup", "nan"), "speedup"),
        (("--speedup", 1), "above 1"),
        (("--speedup", 9), "number of layers"),
        (("--decay", "steep"), "--decay"),
        (("--search", "--prompt-layers", "max"), "--prompt-layers"),
        (("--order", "sideways"), "--order"),
        (("--force",), "--save"),
        (("--limit", 0), "limit"),
    ],
)
def test_what_the_user_can_put_right_is_said_first(
    eight: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[object, ...], words: str
) -> None:
    """Exit code 2, and no model is loaded."""
    monkeypatch.setattr("skipdecode.evaluation.calibration.load", lambda *a, **k: pytest.fail("a model was loaded"))
    done = calibrate(eight, prompts, tmp_path, *more)
    assert done.returncode == 2
    assert words in done.stderr


def test_the_method_is_the_one_that_trained_the_model(six: Path, prompts: Path, tmp_path: Path) -> None:
    """Early exits have no depths; Unified Layer Skipping has its own style, and its own depths are fitted."""
    calm = trained_with(six, tmp_path / "calm", {3.0: Schedule.full(6)}, "calm")
    done = calibrate(calm, prompts, tmp_path, "--speedup", 3)
    assert done.returncode == 2
    assert "no depths to fit" in done.stderr
    unified = trained_with(six, tmp_path / "unified", {3.0: Schedule(6, 2, 2, 1, order="even")}, "unified")
    done = calibrate(unified, prompts, tmp_path, "--speedup", 2, "--decay", "linear")
    assert done.returncode == 2
    assert "it has its own" in done.stderr
    assert calibrate(unified, prompts, tmp_path, "--speedup", 2).returncode == 0
    assert Schedule.load(tmp_path / "schedule.json").order == "even"


def test_nothing_is_written_unasked(six: Path, prompts: Path) -> None:
    """Neither into the current folder nor into the model: one of both is asked for, or nothing is computed."""
    done = run("calibrate", six, "--data", prompts)
    assert done.returncode == 2
    assert "--output FILE" in done.stderr


def test_a_trained_list_of_depths_has_no_form_to_fit(eight: Path, prompts: Path, tmp_path: Path) -> None:
    """F3: it is not silently made linear."""
    model = trained_with(eight, tmp_path / "model", {2.0: Schedule.from_depths(8, (6, 6, 2))})
    done = calibrate(model, prompts, tmp_path, "--speedup", 3)
    assert done.returncode == 2
    assert "--decay" in done.stderr
    assert calibrate(model, prompts, tmp_path, "--speedup", 3, "--decay", "linear").returncode == 0


def test_python_does_all_that_the_verb_does(eight: Path, prompts: Path, tmp_path: Path) -> None:
    """The same schedule and numbers from a CalibrationPlan, and the same refusal to save what is worse."""
    model = trained_with(eight, tmp_path / "model", {4.0: Schedule(8, 8, 7, 200)})
    done = calibrate(model, prompts, tmp_path, "--speedup", 4)
    assert done.returncode == 0, done.stderr
    rows: list[tuple[str, int, int]] = []
    output = tmp_path / "mine.json"
    plan = CalibrationPlan(str(model), prompts, 4, max_new_tokens=24, batch_size=7, output=output, save=True)
    result = calibration.calibrate(plan, on_progress=lambda *now: rows.append(now))
    assert json.loads(json.dumps(result.summary())) == json.loads(done.stdout.splitlines()[-1])
    assert Schedule.load(output) == result.schedule == Schedule.load(tmp_path / "schedule.json")
    assert rows[-1][1] <= rows[-1][2]
    config = (model / "config.json").read_bytes()
    with pytest.raises(UsageError, match="falls from"):
        result.save()
    assert (model / "config.json").read_bytes() == config
    assert result.save(force=True) == model / "config.json"
    assert checkpoint_config.trained_schedules(AutoConfig.from_pretrained(model))[4.0] == result.schedule


@pytest.mark.parametrize("values", [{"clock": "job"}, {"limit": 0}, {"order": "x"}])
def test_a_plan_checks_itself(values: dict[str, Any]) -> None:
    """What cannot be calibrated is said when the plan is made."""
    with pytest.raises(UsageError, match=r"\w"):
        CalibrationPlan("m", Path("data"), **values)


def test_where_a_model_would_be_loaded(
    eight: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The patch of the test of refusals stands where ``calibrate`` loads its model."""
    monkeypatch.setattr("skipdecode.evaluation.calibration.load", lambda *a, **k: pytest.fail("a model was loaded"))
    with pytest.raises(pytest.fail.Exception, match="was loaded"):
        calibrate(eight, prompts, tmp_path)
