"""Evaluation as a user runs it, on a tiny checkpoint: rows, scores, resuming, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import skipdecode
from helpers.tiny import EXAMPLES, run, save_checkpoint, write_examples, write_jsonl
from skipdecode import Schedule
from skipdecode.data.tasks import Example
from skipdecode.evaluation import evaluate as evaluation
from skipdecode.evaluation.evaluate import EvaluateConfig, Variant, evaluate, list_variants
from skipdecode.loading.load import Checkpoint
from skipdecode.model.adapter import Adapter, save_adapter
from skipdecode.model.config import set_entry, to_config_entry

#: Two batches, one of which is short.
FEW = ("--limit", 4, "--max-new-tokens", 8, "--timing-rounds", 1, "--batch-size", 3)
SAME: dict[str, Any] = {"limit": 4, "max_new_tokens": 8, "timing_rounds": 1, "batch_size": 3}


def evaluated(model: object, data: Path, output: Path, *more: object) -> list[dict[str, Any]]:
    done = run("evaluate", model, "--data", data, "--output", output, *FEW, *more, "--json")
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["rows"]
    return rows


@pytest.fixture(scope="module")
def finished(checkpoint: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of an evaluation at 2x and 4x. Copy it to change it."""
    output = tmp_path_factory.mktemp("evaluation")
    evaluated(checkpoint, data, output, "--speedups", "2,4")
    return output


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy"))


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more plots than one."""
    monkeypatch.setattr("skipdecode.evaluation.report.plot_tradeoff", lambda *_: None)


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a model is loaded."""
    monkeypatch.setattr(Checkpoint, "load", lambda *_, **__: pytest.fail("a model was loaded"))


def trained_copy(folder: Path, schedules: dict[float, Schedule], method: str = "skipdecode") -> Path:
    """A checkpoint whose config says that it was trained."""
    save_checkpoint(folder)
    config = Checkpoint.resolve(folder).config
    set_entry(config, to_config_entry(schedules, method))
    config.save_pretrained(folder)
    return folder


def test_one_row_per_method_and_speed(checkpoint: Path, tmp_path: Path) -> None:
    """Scored against the full model's own texts, with references that a random model can repeat."""
    model, tokenizer = skipdecode.load(str(checkpoint))
    prompts = [example.prompt for example in EXAMPLES[:4]]
    full = skipdecode.generate(model, tokenizer, prompts, speedup=1, max_new_tokens=8, do_sample=False)
    inputs = [{"prompt": p, "response": f"{c.text} {p}"} for p, c in zip(prompts, full.completions, strict=True)]
    data = write_jsonl(tmp_path / "data.jsonl", inputs)
    methods = ("skipdecode", "multi_exit")
    rows = evaluated(checkpoint, data, tmp_path / "out", "--speedups", "1,4", "--methods", ",".join(methods))
    assert [(row["method"], row["target"]) for row in rows] == [("full", 1), *((name, 4) for name in methods)]
    full_row, *others = rows
    assert full_row["bleu_difference"] == full_row["rouge_l_difference"] == 0
    assert full_row["bleu_interval"] == [0, 0]
    assert full_row["job_clock_ratio"] == full_row["step_clock_ratio"] == full_row["timed_step_layer_ratio"] == 1
    for row in others:
        assert 1 < row["bleu"] < 100
        assert row["bleu_interval"][0] <= row["bleu_difference"] <= row["bleu_interval"][1]
        assert row["step_layer_ratio"] == pytest.approx(8 / row["step_layers"], rel=1e-2)
        assert row["prompt_layers"] == 8
        assert 1 <= row["job_layer_ratio"] <= row["step_layer_ratio"]
        assert "untrained" in row["label"]
        assert "kl" not in row
        assert row["timed_steps"] == full_row["timed_steps"]
        per_token = row["full_job_seconds_per_1k_tokens"] / row["job_seconds_per_1k_tokens"]
        assert row["job_clock_ratio"] == pytest.approx(per_token, rel=1e-2)
        assert row["step_clock_ratio"] == pytest.approx(row["full_step_ms"] / row["step_ms"], rel=2e-2)
        assert row["step_layers"] == 2
        assert row["timed_step_layer_ratio"] == 4
    assert any(row["bleu_interval"][0] < row["bleu_difference"] < 0 for row in others)


def test_tables_and_a_plot_are_written(finished: Path) -> None:
    saved = json.loads((finished / "table.json").read_text())
    assert [row["target"] for row in saved["rows"]] == [1, 2, 4]
    assert saved["about"]["rows"] == "4 test inputs of jsonl, greedy, batch 3"
    assert "rough" in saved["about"]
    assert (finished / "table.md").read_text().count("\n| ") == len(saved["rows"]) + 1
    assert (finished / "tradeoff.png").read_bytes()[:4] == b"\x89PNG"


def test_prompts_alone_are_compared_with_the_full_model(checkpoint: Path, tmp_path: Path) -> None:
    """Texts with its texts, next tokens with its next tokens. A reference among them is left out, and said."""
    inputs = [{"prompt": example.prompt} for example in EXAMPLES]
    inputs[0]["response"] = "a"
    data = write_jsonl(tmp_path / "rows.jsonl", inputs)
    told: list[str] = []
    config = EvaluateConfig(str(checkpoint), data=data, output=tmp_path / "out", speedups=(1.2, 4), **SAME)
    full, near, far = evaluate(config, say=told.append).rows
    assert any("no reference" in line for line in told)
    assert full["agreement"] == 100
    assert (full["kl"], full["top_1"]) == (0, 100)
    assert near["kl"] < far["kl"]
    for row in (near, far):
        assert 0 <= row["agreement"] < 100
        assert "bleu" not in row
        assert "kl_interval" not in row  # of four texts
        assert row["top_1"] < 100
        assert 0 < row["text_loss"] != full["text_loss"]
        assert "repetition" in row


# --- saved rows


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the rows that are measured from now on."""
    keys: list[str] = []
    measure = evaluation._Evaluation.measure

    def noted(self: Any, variant: Variant, rows: Any) -> Any:
        keys.append(variant.key)
        return measure(self, variant, rows)

    monkeypatch.setattr(evaluation._Evaluation, "measure", noted)
    return keys


def test_a_finished_row_is_not_measured_again(checkpoint: Path, data: Path, copied: Path, measured: list[str]) -> None:
    """After a kill in the middle of a line, too; another speed is added to the rows that are there."""
    path = copied / "rows.jsonl"
    whole = path.read_bytes()
    first = [json.loads(line) for line in whole.splitlines()[1:]]
    path.write_bytes(whole[:-100])
    again = evaluated(checkpoint, data, copied, "--speedups", "2,4")
    assert measured == ["skipdecode-4x"]
    assert again[:2] == first[:2]
    assert again[2]["texts"] == first[2]["texts"]
    # Python's rows count for the verb's, and the other way round.
    config = EvaluateConfig(str(checkpoint), data=data, speedups=(2, 3), output=copied, **SAME)
    progress: list[Any] = []
    assert evaluate(config, on_progress=lambda *now: progress.append(now)).rows[:2] == first[:2]
    assert measured == ["skipdecode-4x", "skipdecode-3x"]
    assert progress[0] == ("skipdecode-3x", 0, 2)
    assert progress[-1] == ("skipdecode-3x, timing", 4, 4)
    assert len(path.read_bytes().splitlines()) == 5


def test_rows_of_other_settings_are_refused_and_kept(
    checkpoint: Path, data: Path, copied: Path, tmp_path: Path, unloaded: None
) -> None:
    """Said before a model is loaded."""
    before = {path: path.read_bytes() for path in copied.iterdir()}
    other = save_checkpoint(tmp_path / "other", positions=64)
    common = ("--data", data, "--output", copied, *FEW, "--speedups", "2")
    for command in (
        ("evaluate", checkpoint, *common, "--max-new-tokens", 11),
        ("evaluate", checkpoint, *common, "--limit", 5),
        ("evaluate", other, *common),
        ("evaluate", checkpoint, *common, "--reference", other),
    ):
        done = run(*command)
        assert done.returncode == 2
        assert "--overwrite" in done.stderr
    assert {path: path.read_bytes() for path in copied.iterdir()} == before


def test_overwrite_measures_all_anew(
    checkpoint: Path, data: Path, copied: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here in int8, which is passed to every load, and said; rows of the same settings too."""
    loaded: list[dict[str, Any]] = []
    load = Checkpoint.load

    def noted(self: Checkpoint, **options: Any) -> Any:
        loaded.append(options)
        return load(self, **options | {"quantization": None})  # not every CPU has the kernels

    monkeypatch.setattr(Checkpoint, "load", noted)
    evaluated(checkpoint, data, copied, "--speedups", "2", "--quantization", "int8", "--overwrite")
    assert measured == ["full-1x", "skipdecode-2x"]
    assert [options["quantization"] for options in loaded] == ["int8"]
    evaluated(checkpoint, data, copied, "--speedups", "2", "--quantization", "int8", "--overwrite")
    assert measured == 2 * ["full-1x", "skipdecode-2x"]
    assert json.loads((copied / "table.json").read_text())["about"]["quantization"] == "int8"


# --- variants


def named(config: EvaluateConfig) -> dict[str, tuple[float, str]]:
    return {variant.key: (variant.speedup, variant.label) for variant in list_variants(config)}


def test_speeds_that_nobody_named_are_the_trained_ones_or_fit_the_model(
    shallow_checkpoint: Path, tmp_path: Path
) -> None:
    assert [speed for speed, _ in named(EvaluateConfig(str(shallow_checkpoint))).values()] == [1, 2, 3, 4]
    schedules = {1.0: Schedule.full(8), 3.0: Schedule(8, 4, 2, 9)}
    trained = trained_copy(tmp_path / "trained", schedules)
    found = list_variants(EvaluateConfig(str(trained)))
    assert [(each.speedup, each.label) for each in found] == [(1, "full model"), (3, "SkipDecode")]
    assert found[1].schedule == schedules[3.0]


def test_labels_say_what_was_trained(tmp_path: Path) -> None:
    """Multi-layer exit runs the bottom layers; SkipDecode runs the top ones."""
    schedules = {4.0: Schedule(8, 2, 2, 1, decay="constant", order="bottom")}
    exits = trained_copy(tmp_path / "exits", schedules, "multi_exit")
    config = EvaluateConfig(str(exits), methods=("multi_exit", "skipdecode"), speedups=(2, 4))
    assert [label for _, label in named(config).values()] == [
        "full model", "multi-layer exit, untrained", "multi-layer exit", "SkipDecode, untrained",
        "SkipDecode, untrained",
    ]  # fmt: skip
    ran = [each.schedule and each.schedule.layers(each.schedule.min_depth) for each in list_variants(config)]
    assert ran == [None, (0, 1, 2, 3), (0, 1), (0, 5, 6, 7), (0, 7)]
    assert list(named(EvaluateConfig(str(exits)))) == ["full-1x", "multi_exit-4x"]
    untrained = save_checkpoint(tmp_path / "untrained")
    (_, four) = list_variants(EvaluateConfig(str(untrained), methods=("multi_exit", "multi_exit"), speedups=(1, 4, 4)))
    assert four.schedule
    assert four.schedule.layers(2) == (0, 1)


def test_another_full_model_is_compared_with(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """The model's own full depth is then a row too. A schedule that skips in the prompt has its prompts counted."""
    trained = {2.0: Schedule(8, 3, 1, 8, prompt_layers=3)}
    other = trained_copy(tmp_path / "other", trained)
    config = EvaluateConfig(str(other), reference=str(checkpoint), data=data, output=tmp_path / "out", **SAME)
    rows = evaluate(replace(config, speedups=(1, 2))).rows
    assert [(row["model"], row["target"]) for row in rows] == [(checkpoint.name, 1), ("other", 1), ("other", 2)]
    assert rows[2]["timed_step_layer_ratio"] == pytest.approx(trained[2].layer_ratio(rows[2]["timed_steps"]), rel=1e-3)
    assert rows[2]["prompt_layers"] == 3
    assert rows[2]["job_layer_ratio"] > 8 / 3


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--methods", "magic"), "unknown method magic"),
        (("--speedups", "1,x"), "numbers"),
        (("--speedups", "1,9"), "number of layers"),
        (("--data", "/nowhere/at/all.jsonl"), "/nowhere"),
        (("--reference", "/nowhere/at/all"), "/nowhere"),
    ],
)
def test_what_the_user_can_fix_is_said_before_a_model_is_loaded(
    checkpoint: Path, data: Path, tmp_path: Path, more: Any, words: str, unloaded: None
) -> None:
    done = run("evaluate", checkpoint, "--data", data, "--output", tmp_path, *FEW, *more)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())


def test_prompts_that_an_adapter_learned_from_are_counted(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    model, _ = skipdecode.load(str(checkpoint))
    save_adapter(tmp_path / "fast", Adapter(32, 4, {2.0: Schedule(8, 4, 4, 1)}), model, str(checkpoint))
    said: list[str] = []
    for learned in (EXAMPLES[:2], []):
        write_examples(tmp_path / "fast" / "self_generated.jsonl", [*learned, Example("another", ("x",))])
        options = SAME | {"overwrite": True, "limit": 3}
        config = EvaluateConfig(str(tmp_path / "fast"), data=data, output=tmp_path / "out", **options)
        evaluate(config, say=said.append)
    assert said == ["the adapter learned from 2 of these 3 prompts: others may come out worse"]


def test_speeds_that_an_adapter_was_not_trained_for_are_refused_before_a_model_is_loaded(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = skipdecode.load(str(checkpoint))
    adapter = Adapter(model.config.hidden_size, 4, {2.0: Schedule(8, 4, 4, 1)})
    save_adapter(tmp_path / "fast", adapter, model, str(checkpoint))
    monkeypatch.setattr(Checkpoint, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    measure = ("evaluate", "--data", data, "--output", tmp_path / "out", *FEW, "--speedups", "2,4")
    for verb, *words in (measure, ("generate", "--prompt", "x", "--speedup", 4)):
        done = run(verb, tmp_path / "fast", *words)
        assert done.returncode == 2
        assert "trained for 2x" in done.stderr
