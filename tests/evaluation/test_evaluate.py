"""Evaluation as a user runs it, on a tiny checkpoint: rows, scores, resuming, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import skipdecode
from helpers.tiny import EXAMPLES, run, save_checkpoint, write_examples
from skipdecode import Schedule
from skipdecode.errors import UsageError
from skipdecode.evaluation import evaluate as evaluation
from skipdecode.evaluation.evaluate import EvaluateConfig, Variant, evaluate, list_variants
from skipdecode.loading.load import Checkpoint
from skipdecode.model.cache import BLOCK_SIZE
from skipdecode.model.config import set_entry, to_config_entry

#: Two batches, one of which is short.
FEW = ("--limit", 6, "--max-new-tokens", 12, "--timing-rounds", 1, "--batch-size", 4)


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """No plot, where it is beside the point."""
    if request.function is not test_tables_and_a_plot_are_written:
        monkeypatch.setattr("skipdecode.evaluation.report.plot_tradeoff", lambda *_: None)


def evaluated(model: object, data: Path, output: Path, *more: object) -> list[dict[str, Any]]:
    done = run("evaluate", model, "--data", data, "--output", output, *FEW, *more, "--json")
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["rows"]
    return rows


def trained_copy(folder: Path, schedules: dict[float, Schedule], method: str = "skipdecode") -> Path:
    """A checkpoint whose config says that it was trained."""
    save_checkpoint(folder)
    config = skipdecode.load(str(folder))[0].config
    set_entry(config, to_config_entry(schedules, method))
    config.save_pretrained(folder)
    return folder


def test_one_row_per_method_and_speed(checkpoint: Path, tmp_path: Path) -> None:
    """Scored against the full model's own texts, with references that a random model can repeat."""
    model, tokenizer = skipdecode.load(str(checkpoint))
    prompts = [example.prompt for example in EXAMPLES[:6]]
    full = skipdecode.generate(model, tokenizer, prompts, speedup=1, max_new_tokens=12, do_sample=False)
    inputs = [{"prompt": p, "response": f"{c.text} {p}"} for p, c in zip(prompts, full.completions, strict=True)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in inputs))
    methods = ("skipdecode", "multi_exit", "calm")
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
    for row in others[:2]:
        assert row["step_layers"] == 2
        assert row["timed_step_layer_ratio"] == 4
        room = 2 * 8 * 4 * BLOCK_SIZE * 32 * 4  # allocated ahead, of 8 layers and 4 sequences
        assert row["peak_kv_bytes"] <= full_row["peak_kv_bytes"] + room
    assert others[2]["token_layer_ratio"] >= others[2]["step_layer_ratio"]
    assert others[2]["threshold_horizon"] == full_row["longest_steps"]
    assert any(row["bleu_interval"][0] < row["bleu_difference"] < 0 for row in others)


def test_tables_and_a_plot_are_written(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    rows = evaluated(checkpoint, data, tmp_path, "--speedups", "2")
    saved = json.loads((tmp_path / "table.json").read_text())
    assert [row["bleu"] for row in saved["rows"]] == [row["bleu"] for row in rows]
    assert saved["about"]["rows"] == "6 test inputs of jsonl, greedy, batch 4"
    assert "rough" in saved["about"]
    assert (tmp_path / "table.md").read_text().count("\n| ") == len(rows) + 1
    assert (tmp_path / "tradeoff.png").read_bytes()[:4] == b"\x89PNG"


def test_prompts_alone_are_compared_with_the_full_model(checkpoint: Path, tmp_path: Path) -> None:
    """Texts with its texts, next tokens with its next tokens."""
    (tmp_path / "prompts.txt").write_text("".join(f"{example.prompt}\n" for example in EXAMPLES))
    full, near, far = evaluated(checkpoint, tmp_path / "prompts.txt", tmp_path / "out", "--speedups", "1.2,4")
    assert full["agreement"] == 100
    assert (full["kl"], full["top_1"]) == (0, 100)
    assert near["kl"] < far["kl"]
    for row in (near, far):
        assert 0 <= row["agreement"] < 100
        assert "bleu" not in row
        assert row["kl_interval"][0] <= row["kl"] <= row["kl_interval"][1]
        assert row["top_1"] < 100
        assert 0 < row["text_loss"] != full["text_loss"]
        assert "repetition" in row


def test_rows_without_references_among_others_are_told(checkpoint: Path, tmp_path: Path) -> None:
    rows = [{"prompt": EXAMPLES[0].prompt, "response": "a"}, {"prompt": EXAMPLES[1].prompt}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told: list[str] = []
    config = EvaluateConfig(str(checkpoint), data=tmp_path / "rows.jsonl", output=tmp_path / "out", speedups=(2,))
    config = replace(config, max_new_tokens=4, timing_rounds=1)
    results = evaluate(config, say=told.append)
    assert any("no reference" in line for line in told)
    assert all("agreement" in row for row in results.rows)


# --- saved rows


def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the rows that are measured from now on."""
    measured: list[str] = []
    measure = evaluation._Evaluation.measure

    def noted(self: Any, variant: Variant, full_row: Any) -> Any:
        measured.append(variant.key)
        return measure(self, variant, full_row)

    monkeypatch.setattr(evaluation._Evaluation, "measure", noted)
    return measured


def test_a_finished_row_is_not_measured_again(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill in the middle of a line, too; another speed is added to the rows that are there."""
    measured = counting(monkeypatch)
    first = evaluated(checkpoint, data, tmp_path, "--speedups", "2,4")
    path = tmp_path / "rows.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert measured == ["full-1x", "skipdecode-2x", "skipdecode-4x"]
    again = evaluated(checkpoint, data, tmp_path, "--speedups", "2,4")
    assert measured[3:] == ["skipdecode-4x"]
    assert again[:2] == first[:2]
    assert again[2]["texts"] == first[2]["texts"]
    evaluated(checkpoint, data, tmp_path, "--speedups", "2,3")
    assert measured[4:] == ["skipdecode-3x"]
    assert len(path.read_bytes().splitlines()) == 5


def test_rows_of_other_settings_are_refused_and_kept(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before a model is loaded."""
    out = tmp_path / "out"
    evaluated(checkpoint, data, out, "--speedups", "2")
    before = {path: path.read_bytes() for path in out.iterdir()}
    other = trained_copy(tmp_path / "other", {})
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "load", lambda *_, **__: pytest.fail("a model was loaded"))
        common = ("--data", data, "--output", out, *FEW, "--speedups", "2")
        for command in (
            ("evaluate", checkpoint, *common, "--max-new-tokens", 11),
            ("evaluate", checkpoint, *common, "--limit", 5),
            ("evaluate", other, *common),
            ("evaluate", checkpoint, *common, "--reference", other),
        ):
            done = run(*command)
            assert done.returncode == 2
            assert "--overwrite" in done.stderr
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    measured = counting(monkeypatch)
    evaluated(checkpoint, data, out, "--speedups", "2", "--limit", 5, "--overwrite")
    assert measured == ["full-1x", "skipdecode-2x"]


def test_python_does_all_that_the_verb_does(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """With the same settings the rows of one count for the other."""
    rows = evaluated(checkpoint, data, tmp_path, "--speedups", "2")
    config = EvaluateConfig(
        str(checkpoint), data=data, speedups=(2,), output=tmp_path, limit=6, batch_size=4, max_new_tokens=12,
        timing_rounds=1,
    )  # fmt: skip
    progress: list[Any] = []
    results = evaluate(config, on_progress=lambda *now: progress.append(now))
    assert results.rows == rows
    assert not progress
    evaluate(replace(config, speedups=(2, 4)), on_progress=lambda *now: progress.append(now))
    assert progress[0] == ("skipdecode-4x", 0, 2)
    assert progress[-1] == ("skipdecode-4x, timing", 4, 4)


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
    """CALM exits where multi-layer exit was trained to."""
    schedules = {4.0: Schedule(8, 2, 2, 1, decay="constant", order="bottom")}
    exits = trained_copy(tmp_path / "exits", schedules, "multi_exit")
    methods = ("multi_exit", "calm", "skipdecode")
    found = named(EvaluateConfig(str(exits), methods=methods, speedups=(2, 4)))
    assert [label for _, label in found.values()] == [
        "full model", "multi-layer exit, untrained", "multi-layer exit", "CALM", "CALM", "SkipDecode, untrained",
        "SkipDecode, untrained",
    ]  # fmt: skip
    assert list(named(EvaluateConfig(str(exits)))) == ["full-1x", "multi_exit-4x"]


def test_another_full_model_is_compared_with(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """The model's own full depth is then a row too."""
    other = trained_copy(tmp_path / "other", {2.0: Schedule(8, 4, 4, 1)})
    rows = evaluated(other, data, tmp_path / "out", "--reference", checkpoint, "--speedups", "1,2")
    assert [(row["model"], row["target"]) for row in rows] == [(checkpoint.name, 1), ("other", 1), ("other", 2)]


def test_a_schedule_file_is_a_row(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """With its file's name; prompts that skip layers are counted."""
    files = {
        "cosine": Schedule(8, 5, 2, 8, order="even", decay="cosine"),
        "short": Schedule(8, 3, 1, 8, prompt_layers=3),
    }
    for name, schedule in files.items():
        schedule.save(tmp_path / f"{name}.json")
    paths = [tmp_path / f"{name}.json" for name in files]
    options: dict[str, Any] = {"limit": 6, "max_new_tokens": 12, "timing_rounds": 1, "batch_size": 4}
    config = EvaluateConfig(
        str(checkpoint), data=data, output=tmp_path / "out", speedups=(2,), schedules=paths, **options
    )
    rows = evaluate(config).rows
    assert [row["method"] for row in rows] == ["full", "skipdecode", "cosine.json", "short.json"]
    for row, schedule in zip(rows[2:], files.values(), strict=True):
        assert row["schedule"] == schedule.to_dict()
        assert row["timed_step_layer_ratio"] == pytest.approx(schedule.layer_ratio(row["timed_steps"]), rel=1e-3)
    assert rows[3]["prompt_layers"] == 3
    assert rows[3]["job_layer_ratio"] > 8 / 3 > rows[1]["job_layer_ratio"]


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
    checkpoint: Path, data: Path, tmp_path: Path, more: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    done = run("evaluate", checkpoint, "--data", data, "--output", tmp_path, *FEW, *more)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())


def test_two_files_of_one_name_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        Schedule(8, 3, 3, 1).save(tmp_path / folder / "s.json")
    files = [tmp_path / folder / "s.json" for folder in ("a", "b")]
    with pytest.raises(UsageError, match="twice"):
        list_variants(EvaluateConfig(str(checkpoint), schedules=files))


def test_optimized_weights_hold_for_every_row_and_are_said(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[dict[str, Any]] = []
    load = Checkpoint.load

    def noted(self: Checkpoint, *arguments: Any, **options: Any) -> Any:
        loaded.append(options)
        return load(self, *arguments)  # not every CPU has the kernels

    monkeypatch.setattr(Checkpoint, "load", noted)
    data = write_examples(tmp_path / "rows.jsonl")
    evaluated(checkpoint, data, tmp_path / "out", "--speedups", "2", "--quantization", "int8")
    assert [options["quantization"] for options in loaded] == ["int8"]
    about = json.loads((tmp_path / "out" / "table.json").read_text())["about"]
    assert about["quantization"] == "int8"
