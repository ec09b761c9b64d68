"""Training sees what decoding will do, costs less, survives a kill, and leaves a stock directory."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from skipdecode.training.checkpoints import SEAL
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer, OPTConfig

import skipdecode
from helpers.tiny import EXAMPLES, TEXTS, run, save_checkpoint, write_examples
from skipdecode import Schedule, SkipCache
from skipdecode.data.collator import Collator, encoded
from skipdecode.data.tasks import Example
from skipdecode.model.attach import teacher_forced
from skipdecode.model.cache_name import CACHE
from skipdecode.model.config import config_schedules, default_schedule, schedule_for, to_config_entry
from skipdecode.training import callback as skipping
from skipdecode.training import trainer as training
from skipdecode.training.losses import Distillation, Objective
from skipdecode.training.trainer import SkipTrainer, training_args

MANY = EXAMPLES * 3


def trainer_of(
    model: Any,
    tokenizer: Any,
    folder: Path,
    schedules: Mapping[float, Schedule],
    eval_dataset: Dataset | None = None,
    objective: Objective | None = None,
    **options: Any,
) -> SkipTrainer:
    """A trainer of two steps."""
    options = {"per_device_train_batch_size": 4, "use_cpu": True, "max_steps": 2} | options
    return SkipTrainer(
        model=model,
        args=training_args(output_dir=str(folder), **options),
        schedules=schedules,
        data_collator=Collator(tokenizer.pad_token_id),
        train_dataset=Dataset.from_list(encoded(MANY, tokenizer, 96)),
        processing_class=tokenizer,
        eval_dataset=eval_dataset,
        objective=objective,
    )


def weights(model: nn.Module) -> torch.Tensor:
    """All of a model's, in one row."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_collator_puts_the_prompt_edge_in_one_column() -> None:
    """Prompts end, and responses begin, in the same column of every row; labels and positions follow."""
    rows = [{"prompt_ids": [5, 6, 7], "response_ids": [8, 9, 1]}, {"prompt_ids": [4], "response_ids": [3] * 9 + [1]}]
    batch = Collator(0)(rows)
    edge = batch["prompt_length"]
    assert batch["input_ids"].shape == (2, 8 + 16)
    assert batch["labels"].shape == (2, 18)
    assert batch["labels"][:, 0].tolist() == [-100, -100]
    for i, row in enumerate(rows):
        n, m = len(row["prompt_ids"]), len(row["response_ids"])
        assert batch["input_ids"][i, edge - n : edge].tolist() == row["prompt_ids"]
        assert batch["input_ids"][i, edge : edge + m - 1].tolist() == row["response_ids"][:-1]
        assert batch["attention_mask"][i].sum() == n + m - 1
        assert batch["labels"][i, 1 : m + 1].tolist() == row["response_ids"]
        assert set(batch["labels"][i, m + 1 :].tolist()) <= {-100}
        seen = batch["attention_mask"][i] == 1
        assert batch["position_ids"][i, seen].tolist() == list(range(n + m - 1))


def test_no_batch_is_wider_than_the_models_positions() -> None:
    """A long prompt and a long response of two rows may not fit side by side; each row alone does."""
    rows = [{"prompt_ids": [4] * 20, "response_ids": [3, 1]}, {"prompt_ids": [5], "response_ids": [6] * 20 + [1]}]
    batch = Collator(0, max_length=30)(rows)
    assert batch["input_ids"].shape[1] <= 30
    assert batch["labels"].shape[1] == batch["input_ids"].shape[1] - batch["prompt_length"] + 2
    kept = batch["labels"][1, 1:]
    assert kept.tolist() == [6] * len(kept)
    assert batch["labels"][0, 1:3].tolist() == [3, 1]
    for longest in range(1, 30):
        batch = Collator(0, max_length=30)([{"prompt_ids": [4] * longest, "response_ids": [3] * (30 - longest)}])
        assert batch["input_ids"].shape[1] <= 30
        assert batch["labels"][0, 1:].tolist()[: 30 - longest] == [3] * (30 - longest)


def test_responses_that_lose_their_ends_are_counted(checkpoint: Path, tmp_path: Path) -> None:
    """Only beside a longer prompt: each row alone fits, and longer ones are left out with a line that counts them."""
    rows = [Example("the " * 70, ("the cat",)), Example("the", (" ".join(["the cat"] * 35),))]
    data = write_examples(tmp_path / "rows.jsonl", [*rows, Example("the", ("the cat " * 100,))])
    options = ("--data", data, "--batch-size", 2, "--max-steps", 2, "--output", tmp_path / "out", "--speedup", 2)
    done = run("train", checkpoint, *options)
    assert done.returncode == 0, done.stderr
    assert "1 training rows are left out: they have over 96 tokens" in done.stderr
    assert "responses lost their ends 2 times" in done.stderr


#: Of the prompt: all layers, as many as the first step runs, and a number in between that falls.
PROMPTS: list[dict[str, Any]] = [{}, {"prompt_layers": "max"}, {"prompt_layers": 6, "prompt_decay": 4}]


@pytest.mark.parametrize("form", PROMPTS)
def test_loss_is_that_of_the_tokens_decoding_would_score(checkpoint: Path, tmp_path: Path, form: Any) -> None:
    """The trainer's loss on a left-padded batch equals step-by-step decoding with a SkipCache, fed the reference."""
    model, tokenizer = skipdecode.load(str(checkpoint))
    schedule = Schedule.for_speedup(2, 8, horizon=6, **form)
    trainer = trainer_of(model, tokenizer, tmp_path, {2: schedule})
    batch = trainer.data_collator(encoded(EXAMPLES[:3], tokenizer, 96))
    loss = trainer.compute_loss(model.eval(), batch)
    edge, cache, logits = batch["prompt_length"], SkipCache(model, schedule), []
    with torch.no_grad():
        for start, end in [(0, edge), *((c, c + 1) for c in range(edge, batch["input_ids"].shape[1]))]:
            out = model(
                batch["input_ids"][:, start:end],
                attention_mask=batch["attention_mask"][:, :end],
                position_ids=batch["position_ids"][:, start:end],
                **{CACHE: cache},
            )
            logits.append(out.logits[:, -1])
    expected = torch.nn.functional.cross_entropy(
        torch.stack(logits, 1).flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100
    )
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", PROMPTS)
def test_a_step_costs_less_than_a_full_one(checkpoint: Path, tmp_path: Path, form: Any) -> None:
    """Forward and backward FLOPs of the layers fall as the columns they run do, those of the prompt too."""
    model, tokenizer = skipdecode.load(str(checkpoint))
    flops = {}
    for name, schedule in {"full": Schedule.full(8), "4x": Schedule.for_speedup(4, 8, horizon=6, **form)}.items():
        trainer = trainer_of(model.train(), tokenizer, tmp_path, {1: schedule})
        batch = trainer.data_collator(encoded(EXAMPLES[:4], tokenizer, 96))
        with FlopCounterMode(display=False) as counter:
            trainer.compute_loss(model, batch).backward()
        flops[name] = counter.get_total_flops()
        edge, width = batch["prompt_length"], batch["input_ids"].shape[1]
    columns = sum(schedule.positions_per_layer(edge, width))
    # Products with the weights fall exactly so; attention falls faster, the head not at all.
    head = (
        3 * 2 * 4 * (width - edge + 1) * model.config.vocab_size * model.config.hidden_size
    )  # forward, and twice back
    assert flops["4x"] < flops["full"]
    assert (flops["4x"] - head) / (flops["full"] - head) == pytest.approx(columns / (8 * width), rel=0.15)


def test_the_prompts_layers_go_into_every_schedule(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """Of the checkpoint's budgets, and of one made from them; generate runs the prompt as trained."""
    options = ("--max-steps", 1, "--eval-steps", 0, "--batch-size", 4, "--speedups", "1,2,4", "--data", data)
    done = run("train", checkpoint, "--output", tmp_path, "--prompt-layers", "max", *options)
    assert done.returncode == 0, done.stderr
    model, tokenizer = skipdecode.load(str(tmp_path))
    schedules = config_schedules(model.config)
    assert {k: schedule.deepest for k, schedule in schedules.items()} == {k: s.max_depth for k, s in schedules.items()}
    other = schedule_for(model.config, 3)
    assert other.deepest == other.max_depth < 8
    result = skipdecode.generate(model, tokenizer, TEXTS[:3], speedup=4, max_new_tokens=12, eos_token_id=-1)
    assert result.stats.prompt_depth == schedules[4].max_depth
    width = max(len(tokenizer(text).input_ids) for text in TEXTS[:3])
    assert 8 / result.stats.job_depth == pytest.approx(
        8 * (width + 11) / sum(schedules[4].positions_per_layer(width, width + 11))
    )


def test_a_prompt_shallower_than_the_steps_is_refused(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """Before weights are loaded: a layer that no prompt position ran has no keys for the steps."""
    done = run("train", checkpoint, "--data", data, "--output", tmp_path / "out", "--prompt-layers", 2, "--speedup", 2)
    assert done.returncode == 2
    assert "prompt_layers is max_depth" in done.stderr
    assert not list((tmp_path / "out").glob("checkpoint*"))


def test_the_result_is_a_stock_directory_that_carries_its_schedule(
    checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    """transformers loads it as any model; generate uses the schedule of the budget asked for."""
    target = tmp_path / "trained"
    options = ("--max-steps", 3, "--eval-steps", 2, "--max-eval-samples", 3, "--horizon", 10, "--batch-size", 4)
    done = run("train", checkpoint, "--data", data, "--output", target, "--speedups", "1,2,4", *options)
    assert done.returncode == 0, done.stderr
    stock = AutoModelForCausalLM.from_pretrained(target)
    assert list(config_schedules(stock.config)) == [1, 2, 4]
    model, tokenizer = skipdecode.load(str(target))
    assert stock.state_dict().keys() == model.state_dict().keys()
    result = skipdecode.generate(model, tokenizer, TEXTS[:3], max_new_tokens=12, eos_token_id=-1)
    schedule = Schedule.for_speedup(4, 8, horizon=10, decay="linear")
    assert result.stats.average_depth == pytest.approx(schedule.average_depth(11))
    other = skipdecode.generate(model, tokenizer, TEXTS[:3], speedup=2, max_new_tokens=12, eos_token_id=-1)
    assert other.stats.average_depth == pytest.approx(
        Schedule.for_speedup(2, 8, horizon=10, decay="linear").average_depth(11)
    )


def test_a_step_descends_the_mean_over_its_response_tokens(checkpoint: Path, tmp_path: Path) -> None:
    """One step of plain gradient descent by the Trainer is the hand-made one: no token missed or counted twice."""
    ends = []
    for by_hand in (False, True):
        model, tokenizer = skipdecode.load(str(checkpoint))
        options: dict[str, Any] = {
            "optim": "sgd",
            "learning_rate": 1.0,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
        }
        options |= {"train_sampling_strategy": "sequential", "max_steps": 1}
        trainer = trainer_of(
            model, tokenizer, tmp_path, {2: Schedule.for_speedup(2, 8, horizon=6, decay="linear")}, **options
        )
        if by_hand:
            batch = trainer.data_collator(encoded(EXAMPLES[:4], tokenizer, 96))
            trainer.compute_loss(model.train(), batch).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= parameter.grad
        else:
            trainer.train()
        ends.append(weights(model))
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


def test_the_fastest_budget_is_the_checkpoints_default() -> None:
    """Schedules go through the config unchanged; full depth alone says nothing."""
    schedules = {k: Schedule.for_speedup(k, 8, horizon=6, decay="linear") for k in (4.0, 2.0, 1.0)}
    config = OPTConfig(skipdecode=to_config_entry(schedules))
    assert config_schedules(config) == schedules
    assert default_schedule(config) == schedules[4]
    assert to_config_entry({1: Schedule.full(8)}) is None


ONE_STEP = ("--max-steps", 1, "--save-steps", 1, "--eval-steps", 0)


@pytest.fixture(scope="module")
def trained(checkpoint: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step at 2x, and its checkpoint. Copy it."""
    folder = tmp_path_factory.mktemp("trained")
    done = run("train", checkpoint, "--data", data, "--output", folder, *ONE_STEP, "--speedup", 2)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "word"),
    [
        (["--speedup", 4], "budgets"),
        (["--method", "unified"], "method"),
        (["--learning-rate", 1e-3], "learning rate"),
        (["--seed", 1], "seed"),
        (["--response-column", "prompt"], "data"),
        (["--distill-weight", 0.5], "distill weight"),
        (["--gradient-accumulation-steps", 2], "gradient accumulation steps"),
    ],
)
def test_a_checkpoint_of_another_run_is_not_resumed(
    changed: list[Any], word: str, checkpoint: Path, trained: Path, data: Path, tmp_path: Path
) -> None:
    """The message says what differs, and the trained model stays; --no-resume starts anew."""
    target = shutil.copytree(trained, tmp_path / "trained")
    common = ("--data", data, "--output", target, *ONE_STEP)
    before = (target / "model.safetensors").read_bytes()
    done = run("train", checkpoint, *common, "--speedup", 2, *changed)
    assert done.returncode == 2
    assert f"another {word}" in done.stderr or f", {word}" in done.stderr
    assert (target / "model.safetensors").read_bytes() == before
    assert run("train", checkpoint, *common, "--speedup", 2, *changed, "--no-resume").returncode == 0


def test_another_model_does_not_get_the_weights_of_the_last_one(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """The model is part of the record, by the identity of its files."""
    common = ("--data", data, "--output", tmp_path / "trained", "--max-steps", 1, "--save-steps", 1, "--eval-steps", 0)
    assert run("train", checkpoint, *common).returncode == 0
    assert "another model" in run("train", save_checkpoint(tmp_path / "other"), *common).stderr


#: Two commands in the processes of one launch, which take long to start.
TWICE = """
import sys
from skipdecode.cli.main import main
for steps in "25":
    try:
        sys.argv[sys.argv.index("--max-steps") + 1 :] = [steps]
        main()
    except SystemExit as stop:
        assert not stop.code
"""


@pytest.mark.slow
def test_two_processes_train_like_one(checkpoint: Path, tmp_path: Path) -> None:
    """With the same rows a step: the same budgets on both, resumed in the middle of an epoch, equal to rounding."""
    for name in ("train", "validation"):
        write_examples(tmp_path / f"{name}.jsonl", (EXAMPLES * 2)[:24])
    common: tuple[object, ...] = ("--speedups", "1,2,4", "--horizon", 4, "--lr-scheduler-type", "constant", "--seed", 2)
    common += ("--data", tmp_path, "--learning-rate", 1e-3, "--warmup-steps", 0, "--save-steps", 2, "--eval-steps", 4)
    done = run("train", checkpoint, *common, "--batch-size", 8, "--max-steps", 5, "--output", tmp_path / "one")
    assert done.returncode == 0, done.stderr
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # --multi_gpu is torchrun; without a GPU the processes talk by gloo.
    launch = f"-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --main_process_port {port}"
    launch += " --mixed_precision no --dynamo_backend no"
    (tmp_path / "twice.py").write_text(TWICE)
    options = ("train", checkpoint, *common, "--batch-size", 4, "--output", tmp_path / "two", "--max-steps")
    command = [sys.executable, *launch.split(), *map(str, (tmp_path / "twice.py", *options))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    two = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert two.returncode == 0, two.stderr
    first, second = two.stderr.split("going on from ")  # said by one of them
    assert [text.count("saved to") for text in (first, second)] == [1, 1]
    assert second.startswith(str(tmp_path / "two" / "checkpoint-2"))
    record = json.loads((tmp_path / "two" / "checkpoint-5" / SEAL).read_text(encoding="utf-8"))["run"]
    assert record["number of processes"] == 2
    before, one, two_in_one = (
        AutoModelForCausalLM.from_pretrained(path) for path in (checkpoint, tmp_path / "one", tmp_path / "two")
    )
    assert config_schedules(one.config) == config_schedules(two_in_one.config)
    moved = (weights(one) - weights(before)).abs()
    assert moved.max() > 1e-3
    assert (weights(one) - weights(two_in_one)).abs().max() < 0.01 * moved.max()


@pytest.mark.slow
def test_training_at_full_depth_takes_an_old_schedule_out(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """A model that runs all layers again does not claim to skip."""
    common = ("--data", data, "--max-steps", 1, "--eval-steps", 0)
    assert run("train", checkpoint, *common, "--output", tmp_path / "a", "--speedup", 2).returncode == 0
    assert run("train", tmp_path / "a", *common, "--output", tmp_path / "b", "--speedup", 1).returncode == 0
    assert not hasattr(AutoModelForCausalLM.from_pretrained(tmp_path / "b").config, "skipdecode")


def test_validation_reports_each_budget(checkpoint: Path, tmp_path: Path) -> None:
    """The loss at each budget differs; eval_loss is that of the last."""
    model, tokenizer = skipdecode.load(str(checkpoint))
    trainer = trainer_of(
        model,
        tokenizer,
        tmp_path,
        {k: Schedule.for_speedup(k, 8, horizon=6, decay="linear") for k in (1, 2)},
        eval_dataset=Dataset.from_list(encoded(EXAMPLES[:5], tokenizer, 96)),
    )
    metrics = trainer.evaluate()
    assert {"eval_1x_loss", "eval_2x_loss", "eval_loss"} <= set(metrics)
    assert metrics["eval_1x_loss"] != metrics["eval_2x_loss"] == metrics["eval_loss"]


def test_budgets_are_drawn_by_seed_and_step_alone(checkpoint: Path, tmp_path: Path) -> None:
    """A second trainer draws the same, and all of them come."""
    model, tokenizer = skipdecode.load(str(checkpoint))
    schedules = {k: Schedule.for_speedup(k, 8, horizon=6, decay="linear") for k in (1.0, 2.0, 4.0)}
    drawn: list[list[Schedule]] = []
    for _ in range(2):
        trainer = trainer_of(model, tokenizer, tmp_path, schedules)
        drawn.append([])
        for trainer.state.global_step in range(60):
            drawn[-1].append(trainer.skipping.drawn(trainer.state.global_step))
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) == set(schedules.values())


@pytest.mark.slow
def test_accumulated_batches_train_like_one_large_batch(checkpoint: Path, tmp_path: Path) -> None:
    """The loss is the mean over all response tokens of a step, however it is cut into batches."""
    ends = []
    for size, pieces in ((8, 1), (2, 4)):
        model, tokenizer = skipdecode.load(str(checkpoint))
        options: dict[str, Any] = {
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": pieces,
            "max_steps": 1,
        }
        trainer = trainer_of(
            model,
            tokenizer,
            tmp_path,
            {2: Schedule.for_speedup(2, 8, horizon=6, decay="linear")},
            train_sampling_strategy="sequential",
            optim="sgd",
            learning_rate=1.0,
            **options,
        )
        trainer.train()
        ends.append(weights(model))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-6)


# Before 5.23, transformers' recomputation comes through the gates: they must be those of the forward pass.
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gates_are_entered_once_a_batch_and_stay_for_the_backward_pass(
    checkpointing: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the teacher runs outside of them; after the step, and after one that failed, none is set."""
    model, tokenizer = skipdecode.load(str(checkpoint))
    schedule = Schedule.for_speedup(4, 8, horizon=6, decay="linear")
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, **training.checkpointing_option(checkpointing)}
    trainer = trainer_of(model, tokenizer, tmp_path, {4: schedule}, objective=Distillation(0.5), **options)
    entered: list[Schedule] = []
    forced = model.model.decoder.layers[0].forward.gates.forced
    backward: list[bool] = []
    enter = teacher_forced

    def counted(model: nn.Module, schedule: Schedule, prompt_length: int) -> Any:
        assert not forced
        entered.append(schedule)
        return enter(model, schedule, prompt_length)

    monkeypatch.setattr(skipping, "teacher_forced", counted)
    next(model.parameters()).register_hook(lambda gradient: backward.append(bool(forced)))
    trainer.train()
    assert entered == [schedule] * 4
    assert backward
    assert all(backward)
    assert not forced
    monkeypatch.setattr(trainer.objective, "prepare", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer.training_step(model.train(), trainer.data_collator(trainer.train_dataset.to_list()[:2]))
    assert not forced
    assert trainer._step is None


# peft 0.21 still asks transformers for a name it deprecates.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    "options", [["--bf16"], ["--gradient-checkpointing"], ["--lora-rank", 4], ["--attn-implementation", "eager"]]
)
def test_ways_to_train(checkpoint: Path, data: Path, tmp_path: Path, options: list[Any]) -> None:
    """Each changes the weights and leaves a stock checkpoint without adapters."""
    target = tmp_path / "trained"
    common = (
        "--max-steps",
        2,
        "--batch-size",
        2,
        "--gradient-accumulation-steps",
        2,
        "--eval-steps",
        0,
        "--learning-rate",
        1e-2,
    )
    done = run("train", checkpoint, "--data", data, "--output", target, "--speedup", 4, *common, *options)
    assert done.returncode == 0, done.stderr
    before, after = (AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in (checkpoint, target))
    if "--lora-rank" in options:  # the adapter lies beside the weights that it is merged into
        from peft import PeftModel

        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint), target / "adapter")
        torch.testing.assert_close(weights(adapted.merge_and_unload()), weights(after))
    assert before.state_dict().keys() == after.state_dict().keys()
    assert torch.isfinite(weights(after)).all()
    assert not torch.equal(weights(before), weights(after))


def test_a_half_precision_checkpoint_trains_in_float32(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """fp16 weights with AdamW end as NaN."""
    AutoModelForCausalLM.from_pretrained(checkpoint).half().save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "half")
    common = ("--max-steps", 2, "--batch-size", 4, "--eval-steps", 0, "--speedup", 2, "--learning-rate", 1e-3)
    done = run("train", tmp_path / "half", "--data", data, "--output", tmp_path / "trained", *common)
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert model.dtype == torch.float32
    assert torch.isfinite(weights(model)).all()


def test_from_scratch_trains_its_own_tokenizer(data: Path, tmp_path: Path) -> None:
    """From a config alone: random weights, and a tokenizer of the size it says."""
    config = {"model_type": "gpt2", "n_layer": 4, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = tmp_path / "trained"
    common = ("--max-steps", 2, "--batch-size", 4, "--eval-steps", 0, "--speedup", 2)
    done = run("train", "--from-config", tmp_path / "config.json", "--data", data, "--output", target, *common)
    assert done.returncode == 0, done.stderr
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert 256 < len(tokenizer) <= 300
    assert tokenizer.decode(tokenizer("the café on the log")["input_ids"]) == "the café on the log"
    assert skipdecode.load(str(target))[0].config.n_layer == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--method", "magic"], "--method"),
        (["--method", "d3", "--order", "even"], "rules of its own"),
        (["--method", "static", "--speedups", "2,4"], "a model per budget"),
        (["--method", "static", "--distill-weight", 0.5], "--teacher"),
        (["--method", "multi_exit", "--distill-weight", 0.5], "loss of its own"),
        (["--teacher", "demo"], "goes with --distill-weight"),
        (["--distill-weight", 1], "in place"),
        (["--speedups", "2,0.5"], "at least 1"),
        (["--speedups", "2,2"], "distinct"),
        (["--speedups", "2,4", "--weights", "1"], "each of 2"),
        (["--speedups", "2,4", "--weights", "0,0"], "not all of them 0"),
        (["--speedups", "2,4", "--schedule", "s.json"], "one of"),
        (["--speedup", 0], "--speedup"),
        (["--method", "scratch", "--speedup", 0.5], "--speedup"),
        (["--method", "unified", "--speedup", 100], "number of layers"),
        (["--lengths", "a"], "--lengths takes whole numbers"),
        (["--order", "x"], "order"),
        (["--decay", "x"], "decay"),
        (["--lr-scheduler-type", "x"], "--lr-scheduler-type"),
        (["--horizon", 0], "horizon"),
        (["--batch-size", 0], "batch-size"),
        (["--tokenizer", ""], "--tokenizer takes text"),
        (["--distill-weight", 1, "--teacher", ""], "--teacher takes text"),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_loaded(
    checkpoint: Path, data: Path, tmp_path: Path, options: list[Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, with a line that names the option."""
    monkeypatch.setattr("skipdecode.loading.load.load", lambda *a, **k: pytest.fail("a model was loaded"))
    done = run("train", checkpoint, "--data", data, "--output", tmp_path / "trained", *options)
    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.parametrize("teacher", [False, True])
def test_distillation_trains(checkpoint: Path, data: Path, tmp_path: Path, teacher: bool) -> None:
    """From full depth or from a teacher: the weights change and stay finite."""
    options = ["--teacher", checkpoint] if teacher else []
    common = ("--max-steps", 3, "--batch-size", 4, "--eval-steps", 0, "--speedups", "1,2,4", "--distill-weight", 0.5)
    target = tmp_path / "trained"
    done = run("train", checkpoint, "--data", data, "--output", target, *common, *options, "--learning-rate", 1e-2)
    assert done.returncode == 0, done.stderr
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (checkpoint, target))
    assert torch.isfinite(weights(after)).all()
    assert not torch.equal(weights(before), weights(after))


def test_a_calibrated_order_is_trained_for_every_budget(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """A ranking goes into all schedules; --schedule is taken as it is."""
    order = (0, 7, 3, 5, 1, 2, 4, 6)
    Schedule(8, 4, 2, horizon=6, order=order).save(tmp_path / "schedule.json")
    common = ("--data", data, "--max-steps", 1, "--eval-steps", 0)
    more = ("--speedups", "2,4", "--order", ",".join(map(str, order)), "--decay", "cosine")
    done = run("train", checkpoint, *common, *more, "--output", tmp_path / "all")
    assert done.returncode == 0, done.stderr
    found = config_schedules(AutoModelForCausalLM.from_pretrained(tmp_path / "all").config)
    assert {(plan.order, plan.decay) for plan in found.values()} == {(order, "cosine")}
    one = ("--schedule", tmp_path / "schedule.json", "--speedup", 3, "--output", tmp_path / "one")
    assert run("train", checkpoint, *common, *one).returncode == 0
    found = config_schedules(AutoModelForCausalLM.from_pretrained(tmp_path / "one").config)
    assert found == {3: Schedule.load(tmp_path / "schedule.json")}
