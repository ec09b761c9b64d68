"""A training run is a plan: the same from Python, from the command line and from a file, and checked alike."""

from __future__ import annotations

import json
import signal
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
import yaml
from hypothesis import given
from hypothesis import strategies as st
from skipdecode.training.checkpoints import AUTHOR, RECORD
from skipdecode.training.options import option_name

from helpers.tiny import run
from skipdecode import Schedule
from skipdecode.cli.main import Stopped, app
from skipdecode.cli.options import Task
from skipdecode.errors import FileError, SkipDecodeError, UsageError
from skipdecode.files import locked
from skipdecode.loading import load as loading
from skipdecode.training.config import TrainingPlan, command_of, option_fields
from skipdecode.training.train import train

SHORT: dict[str, Any] = {"batch_size": 4, "save_steps": 1, "max_steps": 2, "eval_steps": 0, "speedups": "1,2"}


def plan_of(checkpoint: Path, data: Path, output: Path, **values: Any) -> TrainingPlan:
    """Two steps."""
    return TrainingPlan(**SHORT | {"model": checkpoint, "data": data, "output": output} | values)


def weights(folder: Path) -> bytes:
    """Of the model in a folder."""
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "values",
    [
        {"model": "demo"},
        {"model": "demo", "schedule": Schedule.for_speedup(2, 8, horizon=6, order=tuple(range(8)), decay="linear")},
        {"from_config": "config.json", "tokenizer": "a", "speedups": (1.0, 2.5), "weights": (0.0, 1.0)},
        {"model": "demo", "order": (2, 0, 1), "decay": "power", "warmup_layers": 0, "prompt_decay": 3, "lengths": (3,)},
        {"model": "demo", "prompt_layers": "max", "speedups": (1.0, 3.0)},
        {"model": "demo", "prompt_layers": 16, "speedup": 2.0},
        {"model": "demo", "bf16": True, "report_to": ("none",), "max_steps": 7, "distill_weight": 0.5, "teacher": "t"},
    ],
)
def test_a_plan_goes_through_files_unchanged(values: dict[str, Any], tmp_path: Path) -> None:
    """As JSON, as YAML, and inside a run's training.json."""
    plan = TrainingPlan(**values)
    plain = plan.to_dict()
    assert list(plain) == [field.name for field in fields(plan)]
    assert TrainingPlan.from_dict(plain) == plan
    files = {
        "run.json": json.dumps(plain),
        "run.yaml": yaml.safe_dump(plain),
        "run.yml": json.dumps(plain),  # JSON is YAML
        RECORD: json.dumps({"author": AUTHOR, "plan": plain}),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert TrainingPlan.load(tmp_path / name) == plan


def test_an_adapter_learns_in_smaller_batches() -> None:
    """Unless the user says how large; a run's record has the number, not where it comes from."""
    assert TrainingPlan(model="demo", data="rows.jsonl").rows > TrainingPlan(model="demo", own_texts=20).rows > 1
    for values in ({"data": "rows.jsonl"}, {"own_texts": 20}):
        assert TrainingPlan(model="demo", batch_size=5, **values).rows == 5


def test_a_default_that_depends_on_other_options_stays_one(tmp_path: Path) -> None:
    """A run on data, read again with own texts, learns an adapter; what was asked for stays."""
    for asked, later in ((None, True), (False, False)):
        plan = TrainingPlan(model="demo", data="rows.jsonl", adapters=asked)
        assert plan.learns_adapter is False
        (tmp_path / "plan.json").write_text(json.dumps(plan.to_dict()))
        assert TrainingPlan.load(tmp_path / "plan.json", own_texts=20, data=None).learns_adapter is later
    assert "adapters" not in command_of(TrainingPlan(model="demo", data="rows.jsonl").to_dict())


def test_values_are_read_as_people_write_them(tmp_path: Path) -> None:
    """YAML takes 5e-4 for text; several values stand in a list, or have commas between, or are one."""
    (tmp_path / "run.yaml").write_text(
        "model: demo\nlearning_rate: 5e-4\nspeedups: 1,2.5\nmax_steps: '20'\nlengths: 7\n"
    )
    plan = TrainingPlan.load(tmp_path / "run.yaml")
    assert (plan.learning_rate, plan.budgets, plan.max_steps, plan.lengths) == (5e-4, (1.0, 2.5), 20, (7,))
    values: dict[str, Any] = {"model": "demo", "speedups": [1, 2.5]}
    assert TrainingPlan(**values).budgets == plan.budgets


def test_what_is_given_goes_before_the_file(tmp_path: Path) -> None:
    """And puts out what in the file would contradict it, instead of being ignored or refused."""
    file = tmp_path / "run.yaml"
    file.write_text("from_config: c.json\nspeedup: 3\nmax_steps: 10\nseed: 1\n")
    plan = TrainingPlan.load(file, model="demo", speedups="1,2", num_train_epochs=2, seed=4)
    assert (plan.model, plan.from_config, plan.max_steps, plan.num_train_epochs) == ("demo", None, None, 2.0)
    assert (plan.budgets, plan.seed) == ((1.0, 2.0), 4)


@pytest.mark.parametrize(
    ("key", "words"),
    [("learning_rat", "learning_rate"), ("max-steps", "max_steps"), ("resume", "there is no option"), (1, "'1'")],
)
def test_a_key_that_is_none_is_refused(key: object, words: str, tmp_path: Path) -> None:
    """With the file's name, and the names that come near."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"model": "demo", key: 1}))
    with pytest.raises(UsageError, match=words) as error:
        TrainingPlan.load(tmp_path / "run.yaml")
    assert "run.yaml" in str(error.value)


@pytest.mark.parametrize("name", ["run.yaml", "run.json", RECORD])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"null",
        b"3",
        b"\xff\xfe\x00",
        b"{",
        b"a: [",
        b"- a\n- b",
        b"[" * 50_000,
        b'{"author": "skipdecode train"}',
    ],
)
def test_a_file_that_holds_no_options_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    """One error of ours, whatever the file holds."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SkipDecodeError, match=name):
        TrainingPlan.load(tmp_path / name)
    with pytest.raises(FileError, match="missing"):
        TrainingPlan.load(tmp_path / "missing" / name)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"model": "demo", "from_config": "c.json"},
        {"model": 3},
        {"tokenizer": "a"},
        {"max_steps": 2.5},
        {"max_steps": True},
        {"max_steps": 10**400},
        {"seed": None},
        {"speedups": ""},
        {"speedups": []},
        {"speedups": "1,1"},
        {"speedups": {"a": 1}},
        {"speedup": float("nan")},
        {"learning_rate": "fast"},
        {"bf16": 1},
        {"bf16": "yes"},
        {"task": "nope"},
        {"method": "magic"},
        {"lr_scheduler_type": "cosine_with_min_lr"},
        {"decay": "list"},
        {"order": {}},
        {"order": "0,x"},
        {"schedule": 3},
        {"schedule": {"num_layers": 4}},
        {"prompt_share": 1},
        {"num_train_epochs": 0},
        {"method": "d3", "warmup_layers": 2},
        {"method": "calm", "weights": "1"},
        {"distill_weight": 1, "speedups": "1,2", "weights": "0,1"},  # 1x is never drawn
        {"adapter_rank": 64},  # all weights learn
    ],
)
def test_a_plan_checks_itself(values: dict[str, Any]) -> None:
    """Python users get the refusals of the command line, before anything is read."""
    with pytest.raises(SkipDecodeError):
        TrainingPlan(**values if not values or "from_config" in values else {"model": "demo"} | values)


@given(
    name=st.sampled_from(sorted(option_fields())),
    value=st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.lists(st.integers(-2, 9) | st.text(max_size=2), max_size=3)
    | st.dictionaries(st.text(max_size=2), st.none(), max_size=1),
)
def test_any_value_is_taken_or_refused(name: str, value: object) -> None:
    """And what is taken is written and read again as it is."""
    try:
        plan = TrainingPlan.from_dict({"model": "demo", name: value})
    except SkipDecodeError:
        return
    assert TrainingPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_the_model_is_asked_before_its_weights_are_loaded(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only the config or this machine can tell is refused for Python users too, and leaves no folder behind."""
    monkeypatch.setattr(loading, "load", lambda *a, **k: pytest.fail("a model was loaded"))
    for values, word in (
        ({"lora_rank": 10**6}, "--lora-rank"),
        ({"report_to": "no_such_place"}, "no_such_place"),
        ({"speedups": None, "schedule": Schedule.for_speedup(2, 4, horizon=6, decay="linear")}, "4 layers"),
        ({"order": (0, 1)}, "order"),
        ({"distill_weight": 0.5, "teacher": "demo"}, "vocabulary"),
    ):
        with pytest.raises(SkipDecodeError, match=word):
            train(plan_of(checkpoint, data, tmp_path / "out", **values))
        assert not (tmp_path / "out").exists()


def test_python_the_command_line_and_a_file_make_the_same_run(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """To the byte; and what a run leaves makes it once more."""
    plan = plan_of(checkpoint, data, tmp_path / "python", seed=3)
    train(plan)
    flags = [word for key, value in SHORT.items() for word in (option_name(key), value)]
    done = run("train", checkpoint, "--data", data, "--output", tmp_path / "line", "--seed", 3, *flags)
    assert done.returncode == 0, done.stderr
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(plan.to_dict()))
    for config, name in ((tmp_path / "run.yaml", "file"), (tmp_path / "python" / RECORD, "again")):
        done = run("train", "--config", config, "--output", tmp_path / name)
        assert done.returncode == 0, done.stderr
        assert TrainingPlan.load(tmp_path / name / RECORD) == replace(plan, output=str(tmp_path / name))
    assert len({weights(tmp_path / name) for name in ("python", "line", "file", "again")}) == 1
    other = run("train", "--config", tmp_path / "run.yaml", "--seed", 4)
    assert other.returncode == 2
    assert "another seed" in other.stderr


def test_a_plan_of_a_run_that_was_never_started_is_refused(tmp_path: Path) -> None:
    """A training.json without a plan."""
    (tmp_path / RECORD).write_text(json.dumps({"author": AUTHOR}))
    done = run("train", "--config", tmp_path / RECORD)
    assert done.returncode == 2
    assert RECORD in done.stderr


def test_python_takes_the_same_lock(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """A folder in which another process trains is refused."""
    plan = plan_of(checkpoint, data, tmp_path / "out")
    train(plan)
    before = weights(tmp_path / "out")
    with locked(tmp_path / "out" / RECORD), pytest.raises(UsageError, match="in use by process"):
        train(plan, resume=False)
    assert weights(tmp_path / "out") == before


def test_every_field_is_an_option_with_its_group() -> None:
    """The help shows each under its heading; tasks are those of the other verbs."""
    assert get_args(get_args(Task)[0]) == get_args(option_fields()["task"][0])
    line: Any = typer.main.get_command(app)
    known = {parameter.name: parameter for parameter in line.commands["train"].params}
    for name, (_, about) in option_fields().items():
        assert about["help"][-1] in ".)", name
        # typer 0.19 keeps no help of arguments.
        assert (known[name].help or about["help"]).startswith(about["help"].removesuffix("."))
        if name != "model":
            assert known[name].opts[0] == option_name(name)
            assert known[name].rich_help_panel == about["group"]
    groups = [about["group"] for _, about in option_fields().values()]
    assert sorted(set(groups), key=groups.index)[0] is None  # the common ones come first


def test_what_a_stopped_run_says_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command goes on, unless it is one that always starts anew."""

    def stopped(*args: object, **kwargs: object) -> None:
        raise Stopped(signal.SIGINT)

    monkeypatch.setattr("skipdecode.training.train.train", stopped)
    for options, resumes in (((), True), (("--no-resume",), False)):
        done = run("train", "demo", "--output", tmp_path / "out", *options)
        assert done.returncode == 130
        assert ("goes on from what is saved" in done.stderr) == resumes


@pytest.mark.parametrize(
    "beside", [{"order": "even"}, {"horizon": 5}, {"lengths": (3,)}, {"prompt_decay": 2}, {"prompt_layers": 5}]
)
def test_a_schedule_says_it_all(beside: dict[str, Any]) -> None:
    """Options of a schedule beside one that is given would be ignored."""
    with pytest.raises(UsageError, match="--schedule says it all"):
        TrainingPlan.from_dict({"model": "demo", "schedule": Schedule(8, 4, 2, 6).to_dict(), **beside})
