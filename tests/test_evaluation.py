"""Evaluation and calibration as a user runs them, on a tiny checkpoint."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPTNeoConfig, LlamaConfig

import skipdecode
from helpers.tiny import TEXTS, run, save_checkpoint
from skipdecode import Schedule, load
from skipdecode.data.collator import batches_of
from skipdecode.data.tasks import Example, get_task
from skipdecode.errors import UsageError
from skipdecode.evaluation.evaluate import Evaluation, EvaluationPlan, _select, evaluate
from skipdecode.evaluation.loss import response_loss, text_loss
from skipdecode.evaluation.variants import variants
from skipdecode.files import locked
from skipdecode.generation.stats import Completion
from skipdecode.model import config as checkpoint_config
from skipdecode.model.cache import BLOCK_SIZE

EXAMPLES = [Example(text[:9], (text[10:],)) for text in TEXTS]


def options(data: Path, output: Any, *more: Any) -> Any:
    """Of ``evaluate``: two batches, one of which is short."""
    common = ("--limit", 6, "--max-new-tokens", 12, "--repeats", 1, "--timing-rows", 4, "--batch-size", 4)
    return ("--data", data, "--output", output, *common, *more)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plot, where it is beside the point."""
    monkeypatch.setattr("skipdecode.evaluation.evaluate.draw_tradeoff", lambda *_: None)


@pytest.mark.slow
def test_one_row_per_method_and_budget_all_saved_and_drawn(checkpoint: Path, tmp_path: Path) -> None:
    """Scored against the full model's own texts: what is random still has texts that others can repeat."""
    methods = "skipdecode,multi_exit,calm,unified,d3,hsd"
    model, tokenizer = skipdecode.load(str(checkpoint))
    prompts = [e.prompt for e in EXAMPLES[:6]]
    full = skipdecode.generate(model, tokenizer, prompts, speedup=1, max_new_tokens=12, do_sample=False)
    data = tmp_path / "data"
    data.mkdir()
    rows = [{"prompt": p, "response": f"{row.text} {p}"} for p, row in zip(prompts, full.completions, strict=True)]
    (data / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run("evaluate", checkpoint, *options(data, tmp_path, "--speedups", "1,4", "--methods", methods, "--json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [(r["method"], r["target"]) for r in rows] == [("full", 1), *((name, 4) for name in methods.split(","))]
    full = rows[0]
    assert full["bleu_difference"] == full["rouge_l_difference"] == 0
    assert full["bleu_interval"] == [0, 0]
    for row in rows[1:]:
        assert 1 < row["bleu"] < 100
        assert row["bleu_interval"][0] <= row["bleu_difference"] <= row["bleu_interval"][1]
        assert row["step_layer_ratio"] == pytest.approx(8 / row["step_layers"], rel=1e-2)
        assert row["prompt_layers"] == 8
        assert 1 <= row["job_layer_ratio"] <= row["step_layer_ratio"]
        assert row["job_seconds_per_1k_tokens"] > 0
        assert "untrained" in row["label"]
        if row["method"] == "calm":
            assert row["token_layer_ratio"] >= row["step_layer_ratio"]
        else:
            assert row["step_layer_ratio"] == row["token_layer_ratio"] > 1.5
            assert row["job_layer_ratio"] > 1
            room = 2 * 8 * 4 * BLOCK_SIZE * 32 * 4  # spare, of 8 layers and 4 rows
            assert row["peak_kv_bytes"] <= full["peak_kv_bytes"] + room
            assert row["loss"] > 0
    assert any(row["bleu_interval"][0] < row["bleu_difference"] < 0 for row in rows)
    table = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert [float(r["bleu"]) for r in table] == [r["bleu"] for r in rows]
    assert (tmp_path / "table.md").read_text().count("\n| ") == len(rows) + 1
    assert (tmp_path / "tradeoff.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_finished_row_is_not_run_again(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("evaluate", checkpoint, *options(data, tmp_path, "--speedups", "2,4"))
    assert run(*common).returncode == 0
    before = (tmp_path / "table.csv").read_text()
    (tmp_path / "rows" / "skipdecode-4x.json").unlink()
    measure, ran = Evaluation._measure, list[str]()
    path = tmp_path / "rows" / "full-1x.json"
    path.write_text(path.read_text()[:200])  # cut short by a kill

    def noted(self: Evaluation, variant: Any) -> Any:
        ran.append(variant.key)
        return measure(self, variant)

    monkeypatch.setattr(Evaluation, "_measure", noted)
    assert run(*common).returncode == 0
    assert ran == ["full-1x", "skipdecode-4x"]
    after = (tmp_path / "table.csv").read_text()
    assert [row.split(",")[:9] for row in after.splitlines()] == [row.split(",")[:9] for row in before.splitlines()]
    # Another setting is another measurement, and no reason to lose this one (F15).
    assert run(*common, "--limit", 5).returncode == 2
    assert len(ran) == 2
    assert run(*common, "--limit", 5, "--overwrite").returncode == 0
    assert len(ran) == 5


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_baselines_bring_checkpoints_of_their_own(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    train = ("--data", data, "--max-steps", 2, "--eval-steps", 0, "--lengths", "11,11")
    for name, budgets in (("multi_exit", "2,4"), ("d3", "2,4"), ("static", "2"), ("static", "4"), ("scratch", "4")):
        target = tmp_path / (f"{name}-{budgets}" if len(budgets) == 1 else name)
        done = run("train", checkpoint, "--method", name, "--speedups", budgets, "--output", target, *train)
        assert done.returncode == 0, done.stderr
    config = AutoConfig.from_pretrained(tmp_path / "multi_exit")
    assert checkpoint_config.trained_method(config) == "multi_exit"
    assert checkpoint_config.config_schedules(config)[4.0].order == "bottom"
    assert AutoConfig.from_pretrained(tmp_path / "static-4").num_hidden_layers == 2
    methods = ",".join(
        f"{name}={tmp_path / name}{tail}" for name, tail in (("multi_exit", ""), ("d3", ""), ("static", "-{speedup}"))
    )
    output = tmp_path / "evaluation"
    more = ("--speedups", "2,4", "--methods", methods, "--max-new-tokens", 6, "--json")
    done = run("evaluate", checkpoint, *options(data, output, *more))
    assert done.returncode == 0, done.stderr
    rows = {(r["method"], r["target"]): r for r in json.loads(done.stdout.splitlines()[-1])["rows"]}
    assert rows["static", 4]["prompt_layers"] == 2
    assert rows["static", 4]["step_layer_ratio"] == rows["static", 4]["job_layer_ratio"] == 4
    assert rows["static", 2]["step_layer_ratio"] == rows["static", 2]["job_layer_ratio"] == 2
    assert (
        rows["d3", 4]["schedule"]
        == checkpoint_config.config_schedules(AutoConfig.from_pretrained(tmp_path / "d3"))[4.0].to_dict()
    )


@pytest.mark.usefixtures("undrawn")
def test_a_budget_that_was_not_trained_is_run_in_the_form_that_was(
    checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    train = ("--data", data, "--max-steps", 1, "--eval-steps", 0, "--lengths", "11,11", "--output", tmp_path / "even")
    assert run("train", checkpoint, "--speedup", 4, "--order", "even", "--decay", "cosine", *train).returncode == 0
    done = run("evaluate", tmp_path / "even", *options(data, tmp_path, "--speedups", "2,4", "--json"))
    assert done.returncode == 0, done.stderr
    other, same = json.loads(done.stdout.splitlines()[-1])["rows"][1:]
    assert [other["schedule"][key] for key in ("order", "decay")] == ["even", "cosine"]
    assert (
        same["schedule"]
        == checkpoint_config.config_schedules(AutoConfig.from_pretrained(tmp_path / "even"))[4.0].to_dict()
    )
    assert other["label"] == same["label"] == "SkipDecode"


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", ["multi_exit", "calm"])
def test_early_exits_share_a_training(name: str, checkpoint: Path, data: Path, tmp_path: Path) -> None:
    train = ("--data", data, "--max-steps", 1, "--eval-steps", 0, "--lengths", "11", "--output", tmp_path / "exits")
    assert run("train", checkpoint, "--method", name, "--speedup", 4, *train).returncode == 0
    more = ("--speedups", "4", "--methods", "multi_exit,calm,unified", "--max-new-tokens", 6, "--json")
    done = run("evaluate", tmp_path / "exits", *options(data, tmp_path, *more))
    labels = [row["label"] for row in json.loads(done.stdout.splitlines()[-1])["rows"]]
    assert labels == ["full model", "multi-layer exit", "CALM-DEC", "Unified Layer Skipping, untrained"]


def test_speed_ups_that_nobody_named_fit_the_model(shallow_checkpoint: Path, data: Path, tmp_path: Path) -> None:
    plan = EvaluationPlan(str(shallow_checkpoint), data, get_task("jsonl"), output=tmp_path)
    assert {variant.speedup for variant in _select(plan)} == {1, 2, 3, 4}


def test_speed_ups_that_were_trained_are_evaluated_unasked(
    shallow_checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    """And beside a bfloat16 model a trained one, which is saved in float32, is not measured in float32."""
    half = Path(shutil.copytree(shallow_checkpoint, tmp_path / "half"))
    config = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    out = tmp_path / "trained"
    train = ("--data", data, "--max-steps", 1, "--eval-steps", 0, "--lengths", "11", "--speedups", "1,4")
    assert run("train", half, *train, "--output", out).returncode == 0
    plan = EvaluationPlan(str(half), data, get_task("jsonl"), methods=f"skipdecode={out}", output=tmp_path / "table")
    chosen = _select(plan)
    assert {variant.speedup for variant in chosen} == {1, 4}
    evaluation = Evaluation(plan, [], [], chosen)
    assert {str(evaluation._model(variant.model)[0].dtype) for variant in chosen} == {str(evaluation.where[0])}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--methods", "magic"), "unknown method"),
        (("--speedups", "1,x"), "numbers"),
        (("--methods", "d3=/nowhere/at/all"), "no model"),
        (("--speedups", "nan"), "numbers"),
        (("--speedups", "inf"), "numbers"),
        (("--limit", 0), "limit"),
        (("--repeats", -1), "repeats"),
        (("--prompt-share", 0.5, "--task", "e2e"), "goes with jsonl"),
        (("--methods", "static"), "a checkpoint per speed-up"),
        (("--methods", "d3,d3"), "twice"),
        (("--speedups", "1,9"), "number of layers, 8"),
        (("--device", "cuda:99"), "no device"),
        (("--output", __file__), "is a file"),
    ],
)
def test_what_the_user_can_put_right_is_said_before_a_model_is_loaded(
    checkpoint: Path, data: Path, tmp_path: Path, more: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skipdecode.evaluation.evaluate.load", lambda *a, **k: pytest.fail("a model was loaded"))
    done = run("evaluate", checkpoint, *options(data, tmp_path, *more))
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())


@pytest.mark.usefixtures("undrawn")
def test_where_a_model_would_be_loaded(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The patch of the test above stands where ``evaluate`` loads its models."""
    loaded: list[str] = []

    def noted(name: str, **options: Any) -> Any:
        loaded.append(name)
        return skipdecode.load(name)

    monkeypatch.setattr("skipdecode.evaluation.evaluate.load", noted)
    assert run("evaluate", checkpoint, *options(data, tmp_path, "--speedups", "2")).returncode == 0
    assert loaded == [str(checkpoint)]


@pytest.fixture(scope="module")
def schedules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four files: a cosine, a constant depth, one whose prompt is short of layers, and one for another model."""
    folder = tmp_path_factory.mktemp("schedules")
    Schedule(8, 5, 2, 8, order="even", decay="cosine").save(folder / "cosine.json")
    Schedule(8, 3, 3, 1, decay="constant").save(folder / "flat.json")
    Schedule(8, 3, 1, 8, prompt_layers="max").save(folder / "short.json")
    Schedule(6, 3, 2, 8).save(folder / "six.json")
    return folder


@pytest.mark.usefixtures("undrawn")
def test_a_schedule_file_is_a_row_beside_the_speedups(
    checkpoint: Path, data: Path, schedules: Path, tmp_path: Path
) -> None:
    """H: whatever runs in ``generate --schedule`` can be evaluated; its row has the file's name."""
    paths = ",".join(str(schedules / f"{name}.json") for name in ("cosine", "flat", "short"))
    files: Sequence[str] = ("--schedule", paths)
    done = run("evaluate", checkpoint, *options(data, tmp_path, "--speedups", "2", *files, "--json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["method"] for row in rows] == ["full", "skipdecode", "cosine.json", "flat.json", "short.json"]
    for row in rows[2:]:
        schedule = Schedule.load(schedules / row["method"])
        assert row["schedule"] == schedule.to_dict()
        assert row["target"] == schedule.target
        assert row["timed_step_layer_ratio"] == pytest.approx(schedule.layer_ratio(row["timed_steps"]), rel=1e-3)
        assert row["label"].startswith(row["method"])
    assert rows[3]["step_layers"] == 3
    short = Schedule.load(schedules / "short.json")
    assert rows[4]["prompt_layers"] == short.max_depth
    assert 8 / short.max_depth <= rows[4]["job_layer_ratio"] <= rows[4]["step_layer_ratio"]
    assert rows[4]["job_layer_ratio"] > 2 * rows[2]["job_layer_ratio"]  # whose prompt runs all layers
    assert "cosine.json" in (tmp_path / "table.md").read_text()
    # The option may be repeated too, and what is finished counts.
    files = [part for path in files[1].split(",") for part in ("--schedule", path)]
    before = (tmp_path / "rows" / "schedule-flat.json").stat().st_mtime_ns
    assert run("evaluate", checkpoint, *options(data, tmp_path, "--speedups", "2", *files)).returncode == 0
    assert (tmp_path / "rows" / "schedule-flat.json").stat().st_mtime_ns == before


def test_a_schedule_file_that_cannot_be_a_row_is_refused_first(
    checkpoint: Path, data: Path, schedules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another model, twice, or not there."""
    monkeypatch.setattr("skipdecode.evaluation.evaluate.load", lambda *a, **k: pytest.fail("a model was loaded"))
    (tmp_path / "flat.json").write_bytes((schedules / "flat.json").read_bytes())
    for names, words in (
        (schedules / "six.json", "for 6 layers, the model has 8"),
        (f"{schedules / 'flat.json'},{tmp_path / 'flat.json'}", "different names"),
        (schedules / "no.json", "no.json"),
        (data / "test.jsonl", "test.jsonl"),
    ):
        done = run("evaluate", checkpoint, *options(data, tmp_path / "out", "--schedule", names))
        assert done.returncode == 2
        assert words in " ".join(done.stderr.split())
        assert len(done.stderr.splitlines()) == 1


def test_python_does_all_that_the_verb_does(
    evaluated: tuple[Path, tuple[object, ...]], checkpoint: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows, tables and plot from an EvaluationPlan; finished rows count, so no model is loaded."""
    folder, command = evaluated
    assert run(*command).returncode == 0
    table = json.loads((folder / "table.json").read_text())
    for name in ("table.md", "tradeoff.png"):
        (folder / name).unlink()
    monkeypatch.setattr("skipdecode.evaluation.evaluate.load", lambda *a, **k: pytest.fail("a model was loaded"))
    progress = []
    plan = EvaluationPlan(
        str(checkpoint),
        data,
        speedups=(2,),
        output=folder,
        max_new_tokens=12,
        repeats=1,
        timing_rows=4,
        batch_size=4,
        limit=6,
    )
    results = evaluate(plan, say=lambda line: None, on_progress=lambda *now: progress.append(now))
    again = json.loads((folder / "table.json").read_text())
    assert again["rows"] == table["rows"]
    assert again["about"] == {k: v for k, v in table["about"].items() if k != "command"} == results.about
    assert [row["texts"] for row in results.rows]
    assert {path.name for path in results.files} == {"table.md", "table.csv", "table.json", "tradeoff.png"}
    assert progress[-1] == ("skipdecode-2x", 2, 2)


@pytest.mark.parametrize(
    "values",
    [{"speedups": ()}, {"speedups": (2, 2)}, {"speedups": (0.5,)}, {"limit": 0}, {"repeats": -1}],
)
def test_a_plan_checks_itself(values: dict[str, Any]) -> None:
    """What typer refuses on the command line is refused from Python too."""
    with pytest.raises(UsageError, match=next(iter(values))):
        EvaluationPlan("m", **values)


@pytest.mark.usefixtures("undrawn")
def test_columns_of_ones_own_are_evaluated(checkpoint: Path, tmp_path: Path) -> None:
    """H: named by the same two options in every verb."""
    rows = [{"question": e.prompt, "answer": e.references[0]} for e in EXAMPLES]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ("--prompt-column", "question", "--response-column", "answer")
    common = options(tmp_path / "rows.jsonl", tmp_path / "out", "--speedups", "2", "--limit", 4)
    done = run("evaluate", checkpoint, *common, *columns, "--json")
    assert done.returncode == 0, done.stderr
    assert all("bleu" in row for row in json.loads(done.stdout.splitlines()[-1])["rows"])


CUT = {
    "empty": lambda row: b"",
    "half": lambda row: row[: len(row) // 2],
    "null": lambda row: b"null",
    "list": lambda row: b"[1, 2]",
    "no texts": lambda row: json.dumps({k: v for k, v in json.loads(row).items() if k != "texts"}).encode(),
    "other types": lambda row: json.dumps(json.loads(row) | {"texts": 3}).encode(),
    "another digit": lambda row: json.dumps(json.loads(row) | {"step_layers": 9.9}).encode(),
    "deep": lambda row: b"[" * 100_000,
    "not UTF-8": lambda row: b"\xff" + row,
}


@pytest.fixture(scope="module")
def evaluated(checkpoint: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with two finished rows, and the command that filled it."""
    folder = tmp_path_factory.mktemp("evaluated")
    command = ("evaluate", checkpoint, *options(data, folder, "--speedups", "2"))
    assert run(*command).returncode == 0
    return folder, command


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("damage", CUT)
def test_a_damaged_row_is_measured_again_and_said(
    evaluated: tuple[Path, tuple[object, ...]], damage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G: never a traceback, never half a row. (What is measured is measured in the test above.)"""
    folder, command = evaluated
    path = folder / "rows" / "skipdecode-2x.json"
    whole = path.read_bytes()
    path.write_bytes(CUT[damage](whole))
    row = {key: value for key, value in json.loads(whole).items() if key not in ("job", "checksum")}
    measured: list[str] = []

    def stub(self: Evaluation, variant: Any) -> Any:
        measured.append(variant.key)
        return row

    monkeypatch.setattr(Evaluation, "_measure", stub)
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert measured == ["skipdecode-2x"]
    assert "skipdecode-2x.json is damaged" in " ".join(done.stderr.split())
    assert path.read_bytes() == whole


@pytest.mark.usefixtures("undrawn")
def test_other_settings_replace_nothing_unasked(
    evaluated: tuple[Path, tuple[object, ...]], checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    """F15: neither rows nor tables, those of a person least of all; said before a model is loaded."""
    folder, command = evaluated
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for more in (("--max-new-tokens", 11), ("--methods", "full=" + str(save_checkpoint(tmp_path / "other")))):
        done = run(*command, *more)
        assert done.returncode == 2
        assert "--overwrite" in done.stderr
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    mine = tmp_path / "mine"
    for name, content in (("table.csv", "my own"), ("table.json", "{}"), ("table.json", "my own")):
        mine.mkdir(exist_ok=True)
        (mine / name).write_text(content)
        done = run("evaluate", checkpoint, *options(data, mine, "--speedups", "2"))
        assert done.returncode == 2
        assert (mine / name).read_text() == content
    # Another method or speed-up is no other setting: rows that are there stay and count.
    for more in (("--methods", "skipdecode,d3"), ("--speedups", "3")):
        assert run(*command, *more).returncode == 0
        assert all(path.read_bytes() == before[path] for path in before if path.parent.name == "rows")


def test_one_process_at_a_time_fills_a_folder(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """F16: another one is refused with the holder's number, before a model is loaded."""
    command = ("evaluate", checkpoint, *options(data, tmp_path, "--speedups", "2"))
    with locked(tmp_path / "table.json"):
        done = run(*command)
    assert done.returncode == 2
    assert f"in use by process {os.getpid()}" in " ".join(done.stderr.split())
    assert not list(tmp_path.glob("rows/*"))


@pytest.mark.usefixtures("undrawn")
def test_prompts_alone_are_evaluated_by_agreement(checkpoint: Path, tmp_path: Path) -> None:
    """H: how much of the full model's own texts a budget repeats; no reference is needed."""
    (tmp_path / "prompts.txt").write_text("".join(f"{e.prompt}\n" for e in EXAMPLES))
    more = ("--speedups", "1.2,4", "--json")
    done = run("evaluate", checkpoint, *options(tmp_path / "prompts.txt", tmp_path / "out", *more))
    assert done.returncode == 0, done.stderr
    full, *rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert full["agreement"] == 100
    assert all(0 <= row["agreement"] < 100 and "bleu" not in row and "loss" not in row for row in rows)
    assert rows[0]["agreement"] > rows[1]["agreement"]
    table = (tmp_path / "out" / "table.md").read_text()
    assert all(
        head in table for head in ("agreement", "repeated 4-grams", "KL", "same token", "nats of its texts", "2-grams")
    )
    assert all(0 < row["distinct"] <= 100 for row in (full, *rows))
    # The full model's distance from itself is none, and its greedy texts are the likeliest to it.
    assert (full["kl"], full["top_1"]) == (0, 100)
    assert rows[0]["kl"] < rows[1]["kl"]
    assert all(row["kl_interval"][0] <= row["kl"] <= row["kl_interval"][1] for row in rows)
    assert all(row["kl"] > 0 and row["top_1"] < 100 and row["text_loss"] > full["text_loss"] for row in rows)


@pytest.mark.parametrize("kind", ["opt", "gpt-neo", "llama"])
def test_the_loss_of_texts_is_the_stock_models(kind: str, checkpoint: Path) -> None:
    """Token by token, alone and without padding; the end counts where a text has one.

    Batches are padded, but not beyond a table of positions; a model that computes them has no such limit.
    """
    model, tokenizer = load(str(checkpoint), dtype="float32")
    texts = [(text[:11], Completion(text[11:], 1, "stop")) for text in TEXTS if text[11] == " "]
    texts[1] = (texts[1][0], replace(texts[1][1], finish_reason="length"))
    prompts, responses = (
        max(len(tokenizer(text)["input_ids"]) for text in side)
        for side in ([prompt for prompt, _ in texts], [written.text for _, written in texts])
    )
    common = {"vocab_size": len(tokenizer), "hidden_size": 32, "eos_token_id": tokenizer.eos_token_id}
    if kind == "gpt-neo":
        most = prompts + responses
        types = [[["global"], 2]]
        config: Any = GPTNeoConfig(
            num_layers=2, num_heads=4, attention_types=types, max_position_embeddings=most, **common
        )
    elif kind == "llama":
        heads = {"num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
        config = LlamaConfig(max_position_embeddings=prompts - 1, **heads, **common)
    if kind != "opt":
        model = AutoModelForCausalLM.from_config(config).eval()
    nats, count = 0.0, 0
    for prompt, written in texts:
        before = len(tokenizer(prompt)["input_ids"])
        ids = tokenizer(prompt + written.text)["input_ids"]
        ids += [tokenizer.eos_token_id] * (written.finish_reason == "stop")
        with torch.no_grad():
            chances = model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
        nats -= sum(float(chances[at - 1, ids[at]]) for at in range(before, len(ids)))
        count += len(ids) - before
    assert text_loss(model, tokenizer, texts, 2) == pytest.approx(nats / count, rel=1e-4)


@pytest.mark.parametrize(("name", "words"), [("", "is a folder"), ("plot", "picture"), ("no/plot.png", "no folder")])
def test_a_picture_needs_a_name_of_its_kind(tmp_path: Path, name: str, words: str) -> None:
    """F16: ``--png DIR`` wrote DIR.png."""
    (tmp_path / "a").mkdir()
    done = run("demo", "demo", "--repeats", 1, "--png", tmp_path / "a" / name)
    assert done.returncode == 2
    assert words in done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]


def test_a_missing_library_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B6: what to install, not which module was not found. Without --png the demo needs no picture."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "skipdecode.evaluation.plots", raising=False)
    assert run("demo", "--speedups", "1,5", "--repeats", 1).returncode == 0
    done = run("demo", "--png", tmp_path / "demo.png")
    assert done.returncode == 2
    assert "pip install 'skipdecode[cli]'" in done.stderr


def test_variants_take_the_budget_into_their_paths() -> None:
    found = variants("skipdecode,static=runs/static-{speedup},full", "m", (1, 2, 2.5))
    assert len({variant.key for variant in found}) == 5
    assert [(variant.method.name, variant.speedup, variant.model) for variant in found] == [
        ("full", 1, "m"),
        ("skipdecode", 2, "m"),
        ("skipdecode", 2.5, "m"),
        ("static", 2, "runs/static-2"),
        ("static", 2.5, "runs/static-2.5"),
    ]
    # Against another full model, SkipDecode's own full depth is a row too.
    assert [variant.speedup for variant in variants("full=f,skipdecode=m", "m", (1, 2))] == [1, 1, 2]
    # One method on several checkpoints, side by side.
    found = variants("d3,d3=runs/t,d3=runs/u,static=a/s-{speedup},static=b/w-{speedup}", "m", (2,))[1:]
    assert [(each.key, each.model) for each in found] == [
        ("d3-2x", "m"),
        ("d3-2x-t", "runs/t"),
        ("d3-2x-u", "runs/u"),
        ("static-2x-s", "a/s-2"),
        ("static-2x-w", "b/w-2"),
    ]
    assert len({each.label for each in found}) == 5


def test_the_loss_is_the_mean_over_tokens_whatever_the_batches(checkpoint: Path) -> None:
    model, tokenizer = skipdecode.load(str(checkpoint))
    plan = Schedule.for_speedup(3, 8, horizon=6, decay="linear")
    one, four = (response_loss(model, batches_of(EXAMPLES, tokenizer, size), plan) for size in (1, 4))
    assert one == pytest.approx(four, rel=1e-5)
