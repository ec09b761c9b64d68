"""A training step sees what decoding will do, and no more; a resumed run sees the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import skipdecode
from helpers.tiny import EXAMPLES, weights
from skipdecode import Schedule, SkipCache
from skipdecode.data.collator import Collator, encoded
from skipdecode.model.cache_name import CACHE
from skipdecode.model.inspect import decoder_layers
from skipdecode.training.config import TrainConfig
from skipdecode.training.losses import Objective
from skipdecode.training.trainer import SkipTrainer

#: Of the prompt: all layers, as many as the first step runs, and a number in between that falls.
PROMPTS: list[dict[str, Any]] = [{}, {"prompt_layers": "max"}, {"prompt_layers": 6, "prompt_decay": 4}]
SCHEDULES = {float(k): Schedule.for_speedup(k, 8, 6, decay="linear") for k in (1, 2, 4)}


@pytest.fixture
def model(checkpoint: Path) -> tuple[Any, Any]:
    return skipdecode.load(str(checkpoint), dtype="float32")


def trainer_of(
    model: tuple[Any, Any],
    folder: Path,
    schedules: Mapping[float, Schedule] = SCHEDULES,
    objective: Objective | None = None,
    **options: Any,
) -> SkipTrainer:
    """A trainer of two steps of four rows."""
    options = {"batch_size": 4, "max_steps": 2, "eval_steps": 0, "disable_tqdm": True} | options
    network, tokenizer = model
    rows = Dataset.from_list(encoded(EXAMPLES * 3, tokenizer, 96))
    return SkipTrainer(
        model=network,
        args=TrainConfig.create(model="", output=str(folder), **options).arguments(),
        schedules=schedules,
        objective=objective,
        data_collator=Collator(tokenizer.pad_token_id),
        processing_class=tokenizer,
        train_dataset=rows,
        eval_dataset=rows.select(range(5)),
    )


def batch_of(trainer: SkipTrainer, count: int) -> dict[str, Any]:
    return trainer.data_collator(trainer.train_dataset.to_list()[:count])


@pytest.mark.parametrize("form", PROMPTS)
def test_loss_is_that_of_the_tokens_decoding_would_score(model: Any, tmp_path: Path, form: Any) -> None:
    """The trainer's loss on a left-padded batch equals step-by-step decoding with a SkipCache, fed the reference."""
    network, _ = model
    schedule = Schedule.for_speedup(2, 8, 6, decay="linear", **form)
    trainer = trainer_of(model, tmp_path, {2: schedule})
    batch = batch_of(trainer, 3)
    assert batch["attention_mask"][:, 0].min() == 0
    with trainer.skipping.step(0):
        loss = trainer.compute_loss(network.eval(), dict(batch))
    edge, cache, logits = batch["prompt_length"], SkipCache(network, schedule), []
    with torch.no_grad():
        for start, end in [(0, edge), *((c, c + 1) for c in range(edge, batch["input_ids"].shape[1]))]:
            out = network(
                batch["input_ids"][:, start:end],
                attention_mask=batch["attention_mask"][:, :end],
                position_ids=batch["position_ids"][:, start:end],
                **{CACHE: cache},
            )
            logits.append(out.logits[:, -1])
    expected = nn.functional.cross_entropy(
        torch.stack(logits, 1).flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100
    )
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", PROMPTS)
def test_a_layer_learns_from_the_positions_it_runs_alone(model: Any, tmp_path: Path, form: Any) -> None:
    """No gradient comes from another position, and a layer that runs none has none at all."""
    network, _ = model
    schedule = Schedule.for_speedup(4, 8, 6, decay="linear", **form)
    trainer = trainer_of(model, tmp_path, {4: schedule})
    batch = batch_of(trainer, 4)
    counts = schedule.positions_per_layer(batch["prompt_length"], batch["input_ids"].shape[1])
    widths: dict[int, int] = {}
    layers: Any = decoder_layers(network)
    for index, layer in enumerate(layers):
        layer.fc1.register_full_backward_hook(
            partial(lambda index, module, given, grads: widths.update({index: grads[0].numel() // (4 * 64)}), index)
        )
    trainer.training_step(network, batch)
    assert widths == {index: count for index, count in enumerate(counts) if count}


@pytest.mark.parametrize("form", PROMPTS)
def test_a_step_costs_less_than_a_full_one(model: Any, tmp_path: Path, form: Any) -> None:
    """Forward and backward FLOPs of the layers fall as the columns they run do, those of the prompt too."""
    network, _ = model
    flops = {}
    skips = Schedule.for_speedup(4, 8, 6, decay="linear", **form)
    for name, schedule in {"full": Schedule.full(8), "4x": skips}.items():
        trainer = trainer_of(model, tmp_path, {1: schedule})
        batch = batch_of(trainer, 4)
        with FlopCounterMode(display=False) as counter:
            trainer.training_step(network, batch)
        flops[name] = counter.get_total_flops()
    edge, width = batch["prompt_length"], batch["input_ids"].shape[1]
    columns = sum(schedule.positions_per_layer(edge, width))
    # Products with the weights fall exactly so; attention falls faster, the head, forward and twice back, not at all.
    head = 3 * 2 * 4 * (width - edge + 1) * network.config.vocab_size * network.config.hidden_size
    assert (flops["4x"] - head) / (flops["full"] - head) == pytest.approx(columns / (8 * width), rel=0.15)


def test_a_step_descends_the_mean_over_its_response_tokens(checkpoint: Path, tmp_path: Path) -> None:
    """Plain gradient descent by the Trainer is the hand-made step, in one batch or accumulated over four."""
    ends = []
    for size, pieces in ((8, 0), (8, 1), (2, 4)):
        model = skipdecode.load(str(checkpoint), dtype="float32")
        options: dict[str, Any] = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "weight_decay": 0.0}
        options |= {"lr_scheduler_type": "constant", "max_steps": 1, "warmup_steps": 0, "batch_size": size}
        trainer = trainer_of(model, tmp_path, {2: SCHEDULES[2]}, gradient_accumulation_steps=pieces or 1, **options)
        if pieces:
            trainer.train()
        else:
            sampler: Any = trainer._get_train_sampler()
            rows = [trainer.train_dataset[i] for i in list(sampler)[:8]]
            trainer.training_step(model[0], trainer.data_collator(rows))
            with torch.no_grad():
                for parameter in model[0].parameters():
                    parameter -= parameter.grad
        ends.append(weights(model[0]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ends[0], ends[2], rtol=1e-4, atol=1e-6)


def test_speeds_are_drawn_by_seed_and_step_alone(model: Any, tmp_path: Path) -> None:
    """Another trainer draws the same, and all of them come, as often as they weigh."""
    first, second = (trainer_of(model, tmp_path).skipping for _ in range(2))
    assert [first.drawn(step) for step in range(60)] == [second.drawn(step) for step in range(60)]
    first.weights = [0.0, 1.0, 3.0]
    drawn = [first.drawn(step) for step in range(400)]
    counts = [drawn.count(schedule) for schedule in SCHEDULES.values()]
    assert counts[0] == 0
    assert 2 < counts[2] / counts[1] < 4.5


def test_evaluation_reports_each_speed(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``eval_loss`` is that of the last; an interrupted evaluation leaves training as it was."""
    trainer = trainer_of(model, tmp_path)
    metrics = trainer.evaluate()
    assert metrics["eval_1x_loss"] != metrics["eval_2x_loss"] != metrics["eval_4x_loss"] == metrics["eval_loss"]
    monkeypatch.setattr(trainer, "prediction_step", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer.evaluate()
    assert trainer.skipping.current is None


class Stub:
    """What a sampler asks of a trainer."""

    def __init__(self, seed: int, epoch: float) -> None:
        self.args = self.state = self
        self.seed, self.epoch = seed, epoch
