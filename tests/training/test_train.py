"""``train``: a stock directory that carries its schedules; a killed run ends with the weights of an unbroken one."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_model
from torch.multiprocessing.spawn import start_processes
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, OPTConfig, OPTForCausalLM

import skipdecode
from helpers.server import free_port
from helpers.tiny import EXAMPLES, TEXTS, run, train_tokenizer, weights, write_examples
from skipdecode import Schedule
from skipdecode.data.tasks import Example
from skipdecode.errors import DataError, DivergedError, FileError, ModelError, UsageError
from skipdecode.loading.load import Checkpoint
from skipdecode.model.config import CONFIG_KEY, config_schedules, set_entry, to_config_entry, trained_method
from skipdecode.training import train as training
from skipdecode.training.config import TrainConfig
from skipdecode.training.trainer import SkipTrainer, StopBySignal

SHORT: dict[str, Any] = {"batch_size": 4, "max_steps": 1, "eval_steps": 0, "speedups": "1,2,4"}


def train(checkpoint: Path, data: Path, output: Path, say: Any = str, overwrite: bool = False, **options: Any) -> Any:
    """One step, unless options say otherwise; returns the trained model."""
    config = TrainConfig.create(model=str(checkpoint), data=str(data), output=str(output), **SHORT | options)
    training.train(config, overwrite=overwrite, say=say)
    return AutoModelForCausalLM.from_pretrained(output)


@pytest.fixture(scope="module")
def trained(checkpoint: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three steps, by the command line. Read it, or copy it to change it."""
    output = tmp_path_factory.mktemp("trained") / "out"
    words = ["--learning-rate", 1e-3, "--bottom-layers", 2, "--seed", 3, "--batch-size", 4, "--max-steps", 3]
    words += ["--eval-steps", 2, "--speedups", "1,2,4", "--data", data, "--output", output]
    done = run("train", checkpoint, *words)
    assert done.returncode == 0, done.stderr
    return output


def test_the_result_is_a_stock_directory_that_carries_its_schedules(trained: Path) -> None:
    """transformers loads it as any model; generate runs the speed that was asked for, and 2x without."""
    stock = AutoModelForCausalLM.from_pretrained(trained)
    assert config_schedules(stock.config) == {float(k): Schedule.for_speedup(k, 8, warmup=2) for k in (1, 2, 4)}
    model, tokenizer = skipdecode.load(str(trained))
    assert stock.state_dict().keys() == model.state_dict().keys()
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": -1}
    for speedup, depth in ((None, 4), (2, 4), (4, 2), (1, 8)):
        written = skipdecode.generate(model, tokenizer, TEXTS[:3], speedup=speedup, **options)
        assert written.stats.average_depth == depth


def test_the_command_line_and_python_make_the_same_run(
    trained: Path, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"learning_rate": 1e-3, "bottom_layers": 2, "seed": 3, "max_steps": 3, "eval_steps": 2}
    ours = train(checkpoint, data, tmp_path, **options)
    assert torch.equal(weights(ours), weights(AutoModelForCausalLM.from_pretrained(trained)))
    other = run("train", checkpoint, "--data", data, "--output", tmp_path, "--speedups", "1,2,3")
    assert other.returncode == 2
    assert "holds a run with another" in other.stderr


def test_a_trained_model_keeps_its_schedules(trained: Path, data: Path, tmp_path: Path) -> None:
    """Those that it has, unless other ones are asked for; new ones keep its order; 1x alone takes all out."""

    def chosen(before: Mapping[float, Schedule], **options: Any) -> dict[float, Schedule]:
        model_config = AutoConfig.from_pretrained(trained)
        set_entry(model_config, to_config_entry(before, "skipdecode"))
        return training.choose_schedules(TrainConfig.create(model="", **options), model_config)

    order = (0, 7, 3, 5, 1, 2, 4, 6)
    before = {2.0: Schedule.for_speedup(2, 8, 9, decay="linear", order=order)}
    assert chosen(before, speedups="2,4") == before | {4.0: Schedule.for_speedup(4, 8, order=order)}
    falling = chosen({}, speedups="4", decay="cosine", horizon=10, prompt_layers="max")
    assert falling == {4.0: Schedule.for_speedup(4, 8, 10, decay="cosine", prompt_layers="max")}
    assert chosen(before, speedups="2", decay="constant") == {2.0: Schedule.for_speedup(2, 8, order=order)}
    assert chosen(before, speedups="4", method="multi_exit") == {4.0: Schedule.for_speedup(4, 8, order="bottom")}
    assert not hasattr(train(trained, data, tmp_path, speedups="1").config, CONFIG_KEY)


@pytest.fixture(scope="module")
def half(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint in fp16, whose weights AdamW would make NaN."""
    folder = tmp_path_factory.mktemp("half")
    AutoModelForCausalLM.from_pretrained(checkpoint).half().save_pretrained(folder)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True, "gradient_accumulation_steps": 2, "attn_implementation": "sdpa"},
        {"distill_weight": 0.5},
        {"distill_weight": 1, "teacher": "itself"},
        {"method": "multi_exit", "speedups": "2,4", "eval_steps": 2},
    ],
    ids=str,
)
def test_ways_to_train(half: Path, checkpoint: Path, data: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Each changes the weights, and leaves float32 that is finite."""
    options = {name: str(checkpoint) if value == "itself" else value for name, value in options.items()}
    after = train(half, data, tmp_path / "out", max_steps=2, learning_rate=1e-2, **options)
    assert after.dtype == torch.float32
    assert torch.isfinite(weights(after)).all()
    assert not torch.equal(weights(AutoModelForCausalLM.from_pretrained(half)), weights(after))
    assert trained_method(after.config) == options.get("method", "skipdecode")


def test_losses_fall(checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every speed."""
    seen: list[dict[str, float]] = []
    evaluate = SkipTrainer.evaluate

    def recorded(self: SkipTrainer, *args: Any, **options: Any) -> dict[str, float]:
        seen.append(evaluate(self, *args, **options))
        return seen[-1]

    monkeypatch.setattr(SkipTrainer, "evaluate", recorded)
    train(checkpoint, data, tmp_path / "out", max_steps=20, eval_steps=20, eval_on_start=True, learning_rate=1e-2)
    for speedup in (1, 2, 4):
        assert seen[-1][f"eval_{speedup}x_loss"] < 0.9 * seen[0][f"eval_{speedup}x_loss"]


# --- what is told before weights are loaded, or before the first step


def test_what_cannot_be_trained_is_refused(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="another vocabulary"):
        train(checkpoint, data, tmp_path / "out", distill_weight=0.5, teacher="demo")
    monkeypatch.setattr(Checkpoint, "load", lambda *a, **k: pytest.fail("a model was loaded"))
    with pytest.raises(DataError):
        train(checkpoint, tmp_path / "none.jsonl", tmp_path / "out")
    with pytest.raises(ValueError, match="no run wrote"):
        train(checkpoint, data, checkpoint)


def test_what_would_make_saving_fail_is_told_before_the_first_step(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temperature without do_sample is read from a file, but not written to one."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.7}')
    monkeypatch.setattr(SkipTrainer, "train", lambda *a, **k: pytest.fail("training began"))
    with pytest.raises(ModelError, match=r"could not be saved: .*do_sample"):
        train(tmp_path / "model", data, tmp_path / "out")


def test_weights_that_cannot_be_saved_are_recovered(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """A folder stands where the file should."""
    file = tmp_path / "out" / "model.safetensors"
    trained = train(checkpoint, data, tmp_path / "out")
    file.unlink()
    file.mkdir()
    (file / "x").touch()
    with pytest.raises(FileError, match="weights are in"):
        train(checkpoint, data, tmp_path / "out")
    recovered = AutoModelForCausalLM.from_pretrained(checkpoint)
    load_model(recovered, tmp_path / "out" / "recovery" / "model.safetensors")
    assert torch.equal(weights(recovered), weights(trained))


def test_rows_that_the_model_has_no_positions_for_are_counted(checkpoint: Path) -> None:
    said: list[str] = []
    model, tokenizer = skipdecode.load(str(checkpoint))
    long = Example("the", ("the cat " * 100,))
    data = training.trainer_data(model, tokenizer, [*EXAMPLES, long], [], said.append)
    assert len(data["train_dataset"]) == len(EXAMPLES)
    assert said == ["1 examples are left out: over 96 tokens, the model's positions"]
    with pytest.raises(DataError, match="no example fits"):
        training.trainer_data(model, tokenizer, [long], [], said.append)


# --- runs that are killed


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it, and nothing is written after it."""


def killed() -> None:
    raise Killed


@pytest.fixture(scope="module")
def with_dropout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers with dropout: every random draw of a step shows in the weights."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = train_tokenizer(TEXTS * 20, vocab_size=300)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "num_hidden_layers": 3, "ffn_dim": 16}
    tokens = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": 1, "eos_token_id": tokenizer.eos_token_id}
    more = {"vocab_size": len(tokenizer), "num_attention_heads": 2, "max_position_embeddings": 96, "dropout": 0.1}
    OPTForCausalLM(OPTConfig(**sizes, **tokens, **more)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


RUN: dict[str, Any] = {"speedups": "1,2,3", "learning_rate": 1e-2, "warmup_steps": 0, "save_steps": 3, "eval_steps": 4}
RUN |= {"max_steps": 10}


@pytest.fixture(scope="module")
def whole(with_dropout: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Weights of an unbroken run."""
    return weights(train(with_dropout, data, tmp_path_factory.mktemp("whole") / "out", **RUN))


def interrupted(monkeypatch: pytest.MonkeyPatch, step: int, action: Any, *given: Any, **options: Any) -> None:
    """A run in which something happens at the end of a step, before anything of it is saved."""
    end = StopBySignal.on_step_end

    def on_step_end(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == step:
            action()
        end(self, args, state, control, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(StopBySignal, "on_step_end", on_step_end)
        train(*given, **options)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_killed_run_ends_with_the_weights_of_an_unbroken_one(
    accumulation: int,
    whole: torch.Tensor,
    with_dropout: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the bit: rows, speeds and dropout; killed in the first epoch, in the second, and once all steps are done."""
    options = RUN | {"batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
    if accumulation > 1:
        whole = weights(train(with_dropout, data, tmp_path / "whole", **options))
    for step in (2, 5, 8):
        with pytest.raises(Killed):
            interrupted(monkeypatch, step, killed, with_dropout, data, tmp_path / "out", **options)
        (tmp_path / "out" / "checkpoint-99").mkdir(exist_ok=True)  # killed while it was written
    said: list[str] = []
    resumed = train(with_dropout, data, tmp_path / "out", said.append, **options)
    assert any("checkpoint-6" in line for line in said)
    assert torch.equal(weights(resumed), whole)
    assert torch.equal(weights(train(with_dropout, data, tmp_path / "out", **options)), whole)
    assert len(list((tmp_path / "out").glob("checkpoint-*/trainer_state.json"))) in (1, 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_step_under_way(
    number: int,
    whole: torch.Tensor,
    with_dropout: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever --save-steps is. Whoever handled the signal before then gets it, and the run goes on from there."""
    options = RUN | {"save_steps": 100}
    taken: list[int] = []
    before = signal.signal(number, lambda number, _: taken.append(number))
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted(
                monkeypatch, 4, lambda: signal.raise_signal(number), with_dropout, data, tmp_path / "out", **options
            )
        assert taken == [number]
        signal.raise_signal(number)
        assert taken == [number, number]
    finally:
        signal.signal(number, before)
    assert not (tmp_path / "out" / "config.json").exists()
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-4"]
    assert torch.equal(weights(train(with_dropout, data, tmp_path / "out", **options)), whole)


def test_a_diverged_run_saves_nothing(with_dropout: Path, data: Path, tmp_path: Path) -> None:
    """--overwrite starts anew, with other options too."""
    options = RUN | {"save_steps": 100}
    with pytest.raises(DivergedError, match="lower --learning-rate"):
        train(with_dropout, data, tmp_path / "out", **options | {"learning_rate": 1e9})
    assert not list((tmp_path / "out").glob("*.safetensors"))
    with pytest.raises(UsageError, match="another learning_rate"):
        train(with_dropout, data, tmp_path / "out", **options)
    train(with_dropout, data, tmp_path / "out", overwrite=True, **options | {"max_steps": 1})


def _train_as(rank: int, port: int, config: TrainConfig) -> None:
    """One process of two, as torchrun starts them; without a GPU they talk by gloo."""
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()} | {"MASTER_ADDR": "127.0.0.1"})
    AcceleratorState._reset_state(reset_partial_state=True)
    training.train(config)


@pytest.mark.slow
def test_two_processes_train_like_one(checkpoint: Path, tmp_path: Path) -> None:
    """With the same rows a step: the same speeds on both, equal to rounding."""
    rows = write_examples(tmp_path / "rows.jsonl", (EXAMPLES * 2)[:24])
    options = RUN | {"warmup_steps": 0, "lr_scheduler_type": "constant", "max_steps": 5}
    one = train(checkpoint, rows, tmp_path / "one", **options | {"batch_size": 8})
    files = {"model": str(checkpoint), "data": str(rows), "output": str(tmp_path / "two")}
    config = TrainConfig.create(**files | SHORT | options | {"batch_size": 4})
    start_processes(_train_as, (free_port(), config), nprocs=2, start_method="fork")
    two = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    moved = (weights(one) - weights(AutoModelForCausalLM.from_pretrained(checkpoint))).abs().max()
    assert moved > 1e-3
    assert (weights(one) - weights(two)).abs().max() < 0.01 * moved


def test_a_damaged_entry_is_no_traceback() -> None:
    with pytest.raises(ModelError, match="entry skipdecode"):
        training.choose_schedules(TrainConfig.create(model=""), OPTConfig(skipdecode="yes"))
