"""What `train` refuses, what it leaves alone, and what it says: one line, before any weights are loaded."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from skipdecode.training.checkpoints import RECORD, SEAL, RunFolder
from transformers import AutoModelForCausalLM

import skipdecode
from helpers.tiny import EXAMPLES, TEXTS, Done, no_file_above, run, save_checkpoint, write_examples
from skipdecode import Schedule
from skipdecode.data.collator import Collator, encoded
from skipdecode.errors import DivergedError, FileError
from skipdecode.files import locked
from skipdecode.loading import load as loading
from skipdecode.model.config import config_schedules
from skipdecode.training.trainer import SkipTrainer, training_args


@pytest.fixture(scope="module")
def checkpoint(shallow_checkpoint: Path) -> Path:
    """Four layers."""
    return shallow_checkpoint


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One JSONL file: no validation."""
    return write_examples(tmp_path_factory.mktemp("data") / "rows.jsonl")


def trained(checkpoint: Path | str, data: Path, output: Path | str, *options: object) -> Done:
    """``train`` for one step, checkpointed."""
    common = ("--data", data, "--output", output, "--batch-size", 4, "--save-steps", 1, "--max-steps", 1)
    return run("train", checkpoint, *common, *options)


def refused(done: Done, *words: str) -> None:
    """Exit code 2, and one line that holds the words."""
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in done.stderr, (word, last)
    assert "Traceback" not in done.stderr


def contents(folder: Path) -> dict[str, bytes]:
    """All files below ``folder``."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    "options",
    [
        ["--max-eval-samples", -1],
        ["--eval-steps", -1],
        ["--num-train-epochs", 0],
        ["--num-train-epochs", -1],
        ["--num-train-epochs", "inf"],
        ["--num-train-epochs", "nan"],
        ["--num-train-epochs", 1e18],
        ["--max-steps", 0],
        ["--max-steps", -2],
        ["--batch-size", 10**9],
        ["--gradient-accumulation-steps", 0],
        ["--gradient-accumulation-steps", 10**9],
        ["--learning-rate", -1e-5],
        ["--learning-rate", "inf"],
        ["--warmup-steps", -1],
        ["--weight-decay", "nan"],
        ["--weight-decay", -0.1],
        ["--adam-beta2", 1],
        ["--adam-beta2", -0.1],
        ["--lora-rank", -1],
        ["--lora-rank", 10**6],
        ["--save-steps", 0],
        ["--seed", -1],
        ["--horizon", 10**20],
        ["--horizon", 10**9],
        ["--lengths", "inf"],
        ["--lengths", "1e18"],
        ["--lengths", "0"],
        ["--lengths", "3.5"],
        ["--lengths", "-4,5"],
        ["--speedups", "nan"],
        ["--speedups", "2,4", "--weights", "1e308,1e308"],
        ["--speedup", "inf"],
        ["--distill-weight", 1.5],
    ],
)
def test_numbers_that_mean_nothing_are_refused(
    options: list[object], checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F16, G: by option, and nothing is left behind."""
    monkeypatch.setattr(loading, "load", lambda *a, **k: pytest.fail("a model was loaded"))
    done = run("train", checkpoint, "--data", data, "--output", tmp_path / "out", *options)
    refused(done)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_what_is_asked_for_by_name_is_what_is_trained(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """B7: the default's value, given explicitly, is respected on a model that brings another."""
    even = ("--speedup", 2, "--order", "even", "--decay", "cosine")
    assert trained(checkpoint, data, tmp_path / "a", *even).returncode == 0
    for options, form in (
        ((), ("even", "cosine")),
        (("--order", "top"), ("top", "cosine")),
        (("--decay", "linear"), ("even", "linear")),
    ):
        output = tmp_path / f"b{len(options)}{options[-1:]}"
        assert trained(tmp_path / "a", data, output, "--speedup", 2, *options).returncode == 0
        found = config_schedules(AutoModelForCausalLM.from_pretrained(output).config)[2]
        assert (found.order, found.decay) == form
    refused(trained(checkpoint, data, tmp_path / "c", "--method", "unified", "--order", "top"), "rules of its own")


def test_another_tokenizer_is_another_run(data: Path, tmp_path: Path) -> None:
    """B8: with --tokenizer the weights of a run with another one are not taken over."""
    from skipdecode.data.tokenize import train_tokenizer

    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 64, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, texts in (("a", TEXTS * 20), ("b", [text[::-1] for text in TEXTS] * 20)):
        train_tokenizer(texts, vocab_size=300).save_pretrained(tmp_path / name)
    common: tuple[object, ...] = (
        "train",
        "--from-config",
        tmp_path / "config.json",
        "--data",
        data,
        "--output",
        tmp_path / "out",
    )
    common += ("--horizon", 4, "--max-steps", 1, "--save-steps", 1, "--batch-size", 4)
    assert run(*common, "--tokenizer", tmp_path / "a").returncode == 0
    refused(run(*common, "--tokenizer", tmp_path / "b"), "another tokenizer")
    assert "going on from" in run(*common, "--tokenizer", tmp_path / "a").stderr


def test_fresh_removes_the_runs_own_checkpoints_and_no_others(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """F15: folders of the user's stay, whatever their names, resumed or not; in the way they are named."""
    output = tmp_path / "out"
    for name in ("checkpoint-final", "checkpoint-abc", "checkpoint-", "checkpoint-1e3"):
        (output / name).mkdir(parents=True)
        (output / name / "mine.txt").write_text("keep")
    theirs = contents(output)
    assert trained(checkpoint, data, output).returncode == 0
    assert (output / "checkpoint-1").is_dir()
    done = trained(checkpoint, data, output, "--no-resume", "--seed", 1)
    assert done.returncode == 0, done.stderr
    assert "going on" not in done.stderr
    assert theirs.items() <= contents(output).items()
    (output / "checkpoint-77").mkdir()
    (output / "checkpoint-77" / "mine.txt").write_text("keep")
    before = contents(output)
    for options in ((), ("--no-resume",)):
        refused(trained(checkpoint, data, output, *options), "checkpoint-77 ", "move it away")
        assert contents(output) == before


def test_another_models_folder_is_not_written_into(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """F15: OUTPUT holds a model, or a training.json, of somebody else's; or it is MODEL, however it is written."""
    output = save_checkpoint(tmp_path / "theirs", layers=2)
    before = contents(output)
    refused(trained(checkpoint, data, output), str(output), "another --output")
    refused(trained(checkpoint, data, output, "--no-resume"), str(output))
    refused(trained(output, data, f"{output}/../theirs"), "what is to be trained", "another --output")
    assert contents(output) == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / RECORD).write_text('{"lr": 1}')
    refused(trained(checkpoint, data, tmp_path / "other"), RECORD, "another --output")
    assert contents(tmp_path / "other") == {RECORD: b'{"lr": 1}'}


def test_two_runs_in_one_folder(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """F15: the second is refused, with the first one's number, before anything is loaded or removed."""
    output = tmp_path / "out"
    assert trained(checkpoint, data, output).returncode == 0
    before = contents(output)
    with locked(output / RECORD):
        refused(trained(checkpoint, data, output, "--no-resume"), "in use by process", str(os.getpid()))
    assert contents(output) == before


@settings(max_examples=60)
@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=9),
        lambda x: (
            st.lists(x, max_size=2)
            | st.dictionaries(st.sampled_from(["author", "run", "files", "plan", "../x"]), x, max_size=4)
        ),
    )
)
def test_a_damaged_record_is_named(tmp_path: Path, content: object) -> None:
    """G: whatever stands in training.json or in a seal is refused or passed over with its name; nothing is removed."""
    folder = RunFolder(tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint-1"
    checkpoint.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    (checkpoint / SEAL).write_bytes(text)
    (tmp_path / "run" / RECORD).write_bytes(text)
    lines: list[str] = []
    found = folder.newest({}, lines.append)
    assert [found, len(lines)] in ([checkpoint, 0], [None, 1])
    assert all(str(checkpoint) in line for line in lines)
    with pytest.raises(FileError, match=f"{RECORD}.*another --output"):
        folder.claim()


def test_a_cut_record_ends_the_command_with_one_line(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """G: training.json cut at every tenth byte, with a whole checkpoint beside it."""
    output = tmp_path / "out"
    assert trained(checkpoint, data, output).returncode == 0
    record = (output / RECORD).read_bytes()
    before = (output / "model.safetensors").read_bytes()
    for end in range(0, len(record) - 2, len(record) // 5):
        (output / RECORD).write_bytes(record[:end])
        refused(trained(checkpoint, data, output), RECORD, "start anew")
    assert (output / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"num_layers": 4}', b"[" * 100_000])
def test_a_broken_schedule_file_is_named(content: bytes, checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """G: before a model is loaded, with the file's name."""
    (tmp_path / "schedule.json").write_bytes(content)
    words = ("train", checkpoint, "--data", data, "--output", tmp_path / "out")
    refused(run(*words, "--schedule", tmp_path / "schedule.json"), "schedule.json")


# peft 0.21 still asks transformers for a name it deprecates.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("options", [(), ("--lora-rank", 2)])
def test_a_diverged_run_saves_nothing(
    options: tuple[object, ...], checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    """F11: loss or weights not finite: exit 2, one line; the last good checkpoint and model stay as they were."""
    output = tmp_path / "out"
    good = ("--seed", 3, "--warmup-steps", 0, *options)
    assert trained(checkpoint, data, output, *good).returncode == 0
    model = (output / "model.safetensors").read_bytes()
    wild = ("--learning-rate", 1e9, "--no-resume", "--max-steps", 30, "--save-steps", 100)
    done = trained(checkpoint, data, output, *good, *wild)
    refused(done, "nothing was saved since", "--learning-rate")
    assert done.stderr.splitlines()[-1].startswith("skipdecode: ")
    assert (output / "model.safetensors").read_bytes() == model
    for path in output.glob("checkpoint-*/*.safetensors"):
        assert all(torch.isfinite(tensor).all() for tensor in load_file(path).values())


@pytest.mark.parametrize("where", ["weight", "loss"])
def test_nothing_that_is_not_finite_is_saved(where: str, checkpoint: Path, tmp_path: Path) -> None:
    """F11: a weight that only the last step broke is seen before the checkpoint is written."""
    model, tokenizer = skipdecode.load(str(checkpoint))
    trainer = trainer_of(model, tokenizer, tmp_path)
    weight = next(model.parameters())
    with torch.no_grad():
        weight.view(-1)[-1 if where == "weight" else slice(None)] = math.nan
    with pytest.raises(DivergedError):
        trainer._save_checkpoint(model, None) if where == "weight" else trainer.train()
    assert not list(tmp_path.glob("checkpoint-*"))


def trainer_of(model: Any, tokenizer: Any, folder: Path, **options: Any) -> SkipTrainer:
    """A trainer of two steps at 2x."""
    settings = {"per_device_train_batch_size": 4, "use_cpu": True, "max_steps": 2, "disable_tqdm": True} | options
    return SkipTrainer(
        model=model,
        args=training_args(output_dir=str(folder), **settings),
        schedules={1: Schedule.full(4), 2: Schedule.for_speedup(2, 4, horizon=6, decay="linear")},
        data_collator=Collator(tokenizer.pad_token_id),
        train_dataset=Dataset.from_list(encoded(EXAMPLES, tokenizer, 96)),
        eval_dataset=Dataset.from_list(encoded(EXAMPLES, tokenizer, 96)),
        processing_class=tokenizer,
    )


def test_an_interrupted_evaluation_leaves_training_as_it_was(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B13: the budgets of training are drawn again afterwards."""
    model, tokenizer = skipdecode.load(str(checkpoint))
    trainer = trainer_of(model, tokenizer, tmp_path)
    monkeypatch.setattr(trainer, "prediction_step", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer.evaluate()
    assert trainer._evaluated is None


def test_the_guides_python_runs(checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H: docs/training.md, on a smaller model and for fewer steps; what it trains carries its schedule."""
    guide = (Path(__file__).parents[1] / "docs" / "training.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    shutil.copy(data, "rows.jsonl")
    exec(block.replace('"demo"', repr(str(checkpoint))).replace("max_steps=20", "max_steps=1"), {})
    assert 2 in config_schedules(AutoModelForCausalLM.from_pretrained("trained").config)


@pytest.mark.slow
def test_a_full_disk_ends_a_run_with_one_line(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """Held: whichever file does not fit (torch and safetensors give no errno); then the same command goes on."""
    assert trained(checkpoint, data, tmp_path / "whole").returncode == 0
    files = {p.stat().st_size for p in (tmp_path / "whole").rglob("*") if p.is_file()}
    for size in sorted({max(1, n - random.Random(n).randrange(1, 200)) for n in files} | {100, 3000}):
        with no_file_above(size):
            refused(trained(checkpoint, data, tmp_path / "run"), "skipdecode: ")
    assert trained(checkpoint, data, tmp_path / "run").returncode == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "whole")]
    assert weights[0] == weights[1]
