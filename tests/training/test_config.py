"""Configurations: the same run from Python, the command line and a file; an output folder belongs to one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from skipdecode.errors import FileError, SkipDecodeError, UsageError
from skipdecode.training import config
from skipdecode.training.config import DistillConfig, RunConfig, TrainConfig, claim_output


def run_of(output: Path, **options: Any) -> DistillConfig:
    given: dict[str, Any] = {"model": "demo", "output": str(output), "speedups": "2", "seed": 1} | options
    return DistillConfig.create(**given)


def test_a_file_and_options_make_the_same_run(tmp_path: Path) -> None:
    """Values as people write them; what is given goes before the file; the rest is for transformers."""
    file = tmp_path / "run.yaml"
    file.write_text("speedups: 1,2.5\nlearning_rate: 5e-4\nbatch_size: 7\norder: even\nmax_steps: 9\n")
    options: dict[str, Any] = {"speedups": [1, 2.5], "learning_rate": 5e-4, "batch_size": 7, "order": "even"}
    config = TrainConfig.create(file, model="demo", max_steps=3)
    assert config == TrainConfig.create(model="demo", max_steps=3, **options)
    assert config.speedups == (1.0, 2.5)
    args = config.arguments()
    assert (args.learning_rate, args.per_device_train_batch_size, args.max_steps) == (5e-4, 7, 3)
    assert args.per_device_eval_batch_size == 7
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(config.to_dict()))
    assert TrainConfig.create(tmp_path / "again.yaml") == config


def test_train_and_distill_have_defaults_of_their_own() -> None:
    """And any field of transformers goes through."""
    args = TrainConfig.create(model="demo", adam_beta2=0.98, max_grad_norm=3.0, eval_steps=0).arguments()
    assert (args.per_device_train_batch_size, args.learning_rate) == (32, 5e-5)
    assert (args.adam_beta2, args.max_grad_norm, args.eval_strategy) == (0.98, 3.0, "no")
    args = DistillConfig.create(model="demo").arguments()
    assert (args.per_device_train_batch_size, args.learning_rate) == (8, 1.5e-3)


@pytest.mark.parametrize(
    ("options", "bf16"),
    [({}, True), ({"bf16": False}, False), ({"fp16": True}, False), ({"use_cpu": True}, False)],
    ids=str,
)
def test_a_gpu_computes_in_bfloat16_unless_told_otherwise(
    options: dict[str, Any], bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "gpu_has_bfloat16", lambda: True)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    assert TrainConfig.create(model="demo", **{"use_cpu": False} | options).arguments().bf16 == bf16


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (TrainConfig, {"learning_rat": 1}, "learning_rate"),
        (TrainConfig, {"prompts": "x"}, "no option 'prompts'"),
        (TrainConfig, {"speedups": "1,x"}, "--speedups takes numbers"),
        (TrainConfig, {"order": "0,x"}, "--order takes numbers"),
        (TrainConfig, {"speedups": "1,2", "speedup_weights": "1"}, "a number for each"),
        (TrainConfig, {"method": "d3"}, "multi_exit"),
        (TrainConfig, {"method": "multi_exit", "order": "even"}, "its own loss"),
        (TrainConfig, {"method": "multi_exit", "distill_weight": 0.5}, "its own loss"),
        (TrainConfig, {"horizon": 9}, "--decay and --horizon go together"),
        (TrainConfig, {"decay": "linear"}, "the longest response"),
        (TrainConfig, {"teacher": "demo"}, "--distill-weight"),
        (TrainConfig, {"distill_weight": 1, "speedups": "2,3"}, "keeps the full model"),
        (TrainConfig, {"distill_weight": 1, "speedups": "1,2", "speedup_weights": "0,1"}, "keeps the full model"),
        (TrainConfig, {"prompt_layers": "all"}, "--prompt-layers takes numbers"),
        (TrainConfig, {"prompt_layers": ""}, "--prompt-layers takes numbers"),
        (TrainConfig, {"speedups": ""}, "--speedups takes numbers"),
        (TrainConfig, {"speedups": "2,2"}, "each once"),
        (TrainConfig, {"speedup_weights": "-1,2"}, "0 or more"),
        (TrainConfig, {"speedup_weights": "0,0"}, "not all 0"),
        (DistillConfig, {"speedup_weights": "1,1"}, "one or more"),
        (TrainConfig, {"distill_weight": 3}, "number of 0.0 to 1, not 3"),
        (TrainConfig, {"max_eval_samples": "many"}, "whole number of 0 to inf, not 'many'"),
        (TrainConfig, {"seed": -1}, "seed must be"),
        (DistillConfig, {"seed": 2**32}, "seed must be"),
        (DistillConfig, {"max_new_tokens": 1}, "2 to inf"),
        (DistillConfig, {"temperature": 0}, "temperature must be"),
        (DistillConfig, {"temperature": float("nan")}, "temperature must be"),
        (TrainConfig, {"batch_size": 0}, "per_device_train_batch_size must be"),
        (TrainConfig, {"learning_rate": "fast"}, "learning_rate must be a number"),
        (TrainConfig, {"logging_steps": "abc"}, "logging_steps must be a number"),
        (DistillConfig, {"speedups": "1,2"}, "1x is the model itself"),
        (DistillConfig, {"adapter": "fast", "bottom_layers": 2}, "has its layers"),
    ],
)
def test_what_contradicts_itself_is_refused(kind: type[RunConfig], options: dict[str, Any], said: str) -> None:
    with pytest.raises(SkipDecodeError, match=said):
        kind.create(**{"model": "demo"} | options)


@pytest.mark.parametrize("options", [{"lr_scheduler_type": "cosin"}, {"optim": "foo"}, {"accelerator_config": "x"}])
def test_what_transformers_does_not_take_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="TrainingArguments do not take"):
        TrainConfig.create(model="demo", **options).arguments()


@pytest.mark.parametrize("content", ["", "[]", "- a\n- b", "a: [", "\udcff"])
def test_a_file_without_options_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content.encode(errors="surrogateescape"))
    for path in (file, tmp_path / "missing.yaml"):
        with pytest.raises(FileError, match=path.name):
            TrainConfig.create(path, model="demo")


def test_the_newest_whole_checkpoint_is_resumed(tmp_path: Path) -> None:
    """Of the same run; more steps, or other reports, are the same run."""
    assert claim_output(run_of(tmp_path), "a", overwrite=False) is None
    for step, whole in ((2, True), (10, True), (12, False)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / ("trainer_state.json" if whole else "optimizer.pt")).touch()
    assert claim_output(run_of(tmp_path), "a", overwrite=False) == tmp_path / "checkpoint-10"
    assert claim_output(run_of(tmp_path, max_steps=90, save_steps=3), "a", overwrite=False)


@pytest.mark.parametrize(
    "other", [{"seed": 2}, {"speedups": "3"}, {"learning_rate": 1e-3}, {"model": "other"}, {"rank": 9}, {}]
)
def test_a_folder_belongs_to_one_run(tmp_path: Path, other: dict[str, Any]) -> None:
    """Files of the model count, not its name alone; --overwrite starts anew, and keeps texts that would be the same."""
    claim_output(run_of(tmp_path), "a", overwrite=False)
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "self_generated.jsonl").touch()
    fingerprint = "a" if other else "b"
    with pytest.raises(UsageError, match=f"another {next(iter(other), 'fingerprint')}.*--overwrite"):
        claim_output(run_of(tmp_path, **other), fingerprint, overwrite=False)
    assert claim_output(run_of(tmp_path, **other), fingerprint, overwrite=True) is None
    assert not (tmp_path / "checkpoint-2").exists()
    kept = not {"seed"}.intersection(other) and bool(other)
    assert (tmp_path / "self_generated.jsonl").exists() == kept
    assert claim_output(run_of(tmp_path, **other), fingerprint, overwrite=False) is None


def test_somebody_elses_model_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    for overwrite in (False, True):
        with pytest.raises(FileError, match="no run wrote"):
            claim_output(run_of(tmp_path), "a", overwrite)
