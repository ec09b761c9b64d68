"""Losses: means over response tokens, distances from teachers that learn nothing, one full pass for all speeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div

import skipdecode
from helpers.families import LAYERS, build
from helpers.tiny import TEXTS
from skipdecode import Schedule, attach
from skipdecode.data.collator import batches_of
from skipdecode.data.tasks import Example
from skipdecode.model.adapter import Adapter
from skipdecode.training.losses import (
    POSITIONS,
    Distillation,
    DistillationModel,
    ExitLoss,
    KLDivergence,
    Objective,
    token_loss,
)

SKIPS = Schedule.for_speedup(2, LAYERS)
FULL = Schedule.full(LAYERS)


def pass_of(model: Any, **options: Any) -> Any:
    """Outputs, labels of the last five columns with some padding, and the inputs."""
    ids = torch.randint(2, 100, (2, 12), generator=torch.Generator().manual_seed(1))
    labels = torch.cat([torch.full((2, 1), -100), ids[:, -5:]], 1)
    labels[1, -2:] = -100
    return model(ids, **options), labels, {"input_ids": ids, "labels": labels, "prompt_length": 8}


def test_the_loss_is_the_mean_over_tokens_of_all_accumulated_batches() -> None:
    logits, labels = torch.randn(2, 7, 9), torch.tensor([[-100, 3, 4, -100], [-100, 5, -100, -100]])
    tokens = [
        cross_entropy(logits[row, column], labels[row, at]) for row, column, at in ((0, 4, 1), (0, 5, 2), (1, 4, 1))
    ]
    torch.testing.assert_close(token_loss(logits, labels), torch.stack(tokens).mean())
    torch.testing.assert_close(token_loss(logits, labels, 10), torch.stack(tokens).sum() / 10)


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_exits_are_those_of_the_models_cut_there(name: str) -> None:
    """The mean over all depths of the loss of the model that has only its bottom layers."""
    model = attach(build(name))
    outputs, labels, inputs = pass_of(model, output_hidden_states=True)
    parts = []
    for depth in range(1, LAYERS + 1):
        cut = Schedule.full(LAYERS).replace(order="bottom").flat(depth)
        with torch.no_grad(), skipdecode.teacher_forced(model, cut, 0):
            parts.append(Objective()(model(inputs["input_ids"]), labels))
    loss = ExitLoss(model)
    assert loss.schedule == FULL
    torch.testing.assert_close(loss(outputs, labels), torch.stack(parts).mean())


def test_exits_learn_from_a_share_of_the_tokens() -> None:
    """The same loss in expectation, of fewer logits."""
    model = attach(build("llama"))
    outputs, labels, _ = pass_of(model, output_hidden_states=True)
    loss = ExitLoss(model, share=0.3)
    rows: list[int] = []
    reader = loss.reader

    def counted(states: torch.Tensor) -> torch.Tensor:
        rows.append(len(states))
        return reader(states)

    loss.reader = counted
    torch.manual_seed(0)
    with torch.no_grad():
        found = torch.stack([loss(outputs, labels) for _ in range(400)])
    whole = ExitLoss(model)(outputs, labels)
    assert float(found.std()) > 0
    assert abs(found.mean() - whole) < 4 * found.std() / 20
    assert sum(rows) / len(rows) < 0.4 * int((labels[:, 1:] != -100).sum())


def test_distillation_from_oneself_adds_nothing_at_1x() -> None:
    model = attach(build("llama"))
    outputs, labels, inputs = pass_of(model)
    plain = Objective()(outputs, labels)
    mine = Distillation(0.5)
    mine.prepare(model, inputs, FULL)
    torch.testing.assert_close(mine(outputs, labels), plain)
    mine.prepare(model, inputs, SKIPS)
    # The outputs are the teacher's own here: the distance is 0, and half of the loss is left.
    torch.testing.assert_close(mine(outputs, labels), plain / 2, rtol=1e-4, atol=1e-5)


def test_distillation_pulls_towards_the_teacher() -> None:
    """By the divergence of response tokens alone; the teacher gets no gradient."""
    model, teacher = attach(build("llama")), build("llama")
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.1)
    outputs, labels, inputs = pass_of(model)
    objective = Distillation(1.0, teacher)
    objective.prepare(model, inputs, FULL)
    loss = objective(outputs, labels)
    learned = labels[:, 1:] != -100
    student, target = (
        each[:, -5:][learned].log_softmax(-1) for each in (outputs.logits, teacher(inputs["input_ids"]).logits)
    )
    torch.testing.assert_close(loss, kl_div(student, target, log_target=True, reduction="batchmean"))
    loss.backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert any(p.grad is not None for p in model.parameters())


def distilled(checkpoint: Path, schedules: dict[float, Schedule]) -> tuple[DistillationModel, dict[str, Any]]:
    """An adapter that does something, and a batch of texts."""
    model, tokenizer = skipdecode.load(str(checkpoint), dtype="float32")
    adapter = Adapter(model.config.hidden_size, 4, schedules)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape))
    (batch,) = batches_of([Example(TEXTS[i], (TEXTS[i + 1],)) for i in range(3)], tokenizer, 3)
    return DistillationModel(attach(model, adapter=adapter), adapter).train(), batch


def test_speeds_learn_from_one_full_pass_as_from_their_own(checkpoint: Path) -> None:
    """Losses and gradients of each schedule, whatever others learned from the same full pass before."""
    schedules = {2.0: Schedule(8, 5, 3, horizon=4), 4.0: Schedule(8, 2, 2, horizon=1, decay="constant")}
    model, batch = distilled(checkpoint, schedules)
    shared = model.teacher_output(batch)
    results = []
    for again in (False, True):
        for schedule in schedules.values():
            model.zero_grad()
            loss = model(model.teacher_output(batch) if again else shared, schedule)
            loss.backward()
            results.append([loss, *(p.grad for p in model.adapter.parameters() if p.grad is not None)])
    assert len(results[0]) > len(results[1]) > 1
    for together, alone in zip(results[:2], results[2:], strict=True):
        assert all(map(torch.equal, together, alone))


def test_an_adapters_loss_is_the_divergence_from_the_model_itself(checkpoint: Path) -> None:
    """0 at 1x, to the bit; counted over text tokens but the first, which the prompt's pass gives."""
    model, batch = distilled(checkpoint, {2.0: SKIPS})
    teacher = model.teacher_output(batch)
    assert model(teacher, FULL).item() == 0
    counted = batch["labels"][:, 2:] != -100
    with skipdecode.teacher_forced(model.model, SKIPS, batch["prompt_length"]), torch.no_grad():
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
        logits = model.model(**inputs).logits[:, batch["prompt_length"] :][counted]
    target = teacher.logits[counted].log_softmax(-1)
    expected = kl_div(logits.log_softmax(-1), target, log_target=True, reduction="batchmean")
    torch.testing.assert_close(model(teacher, SKIPS), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model(teacher, SKIPS, 100), expected * counted.sum() / 100, rtol=1e-4, atol=1e-6)


def test_the_divergence_and_its_gradient_are_those_of_autograd() -> None:
    """Over more positions than are compared at a time."""
    logits = torch.randn(3, POSITIONS - 5, 11, requires_grad=True)
    target, counted = torch.randn_like(logits), torch.rand(logits.shape[:2]) < 0.7
    expected = kl_div(
        logits[counted].log_softmax(-1), target[counted].log_softmax(-1), log_target=True, reduction="sum"
    )
    found: Any = KLDivergence.apply(logits, target, counted)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(value / 7, logits)[0] for value in (found, expected)]
    torch.testing.assert_close(*gradients)
