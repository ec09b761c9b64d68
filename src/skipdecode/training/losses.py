"""Training losses: the response's cross-entropy, and distillation from a model that runs all layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import PreTrainedModel

from ..evaluation.early_exit import read_out
from ..model.attach import attach, teacher_forced
from ..model.inspect import decoder_layers
from ..schedule import Schedule


def token_loss(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Return the mean cross-entropy of response tokens over the accumulated batch.

    Args:
        logits: (batch, at least R, vocabulary); the last R columns count.
        labels: (batch, 1 + R); the first column and -100 do not count.
        num_items_in_batch: response tokens of the accumulated batch; None: those of ``labels``.
    """
    labels = labels[:, 1:]
    logits = logits[:, -labels.shape[1] :].float()
    total = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


class Objective:
    """The paper's loss, cross-entropy on the response, and the base class of other losses."""

    #: Whether the loss reads ``outputs.hidden_states``.
    hidden_states = False
    #: If not None, the schedule that every training step runs in place of the drawn one.
    schedule: Schedule | None = None

    def prepare(self, model: nn.Module, inputs: dict[str, Any], schedule: Schedule) -> None:
        """Prepare the loss before a training pass over ``inputs`` with ``schedule``, while no layer is skipped.

        ``inputs`` are those of the model, and ``prompt_length``, which only a pass that skips takes.
        """

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Return the loss of a batch, a scalar; :func:`token_loss` explains the labels."""
        return token_loss(outputs.logits, labels, num_items_in_batch)


class Distillation(Objective):
    """``(1 - weight)`` times cross-entropy, ``weight`` times the KL divergence from a model that runs all its layers.

    Args:
        weight: above 0, at most 1.
        teacher: another model of the same vocabulary; None: the trained model itself at full depth, without dropout.
            A step whose schedule is full then uses cross-entropy alone.
    """

    def __init__(self, weight: float, teacher: nn.Module | None = None) -> None:
        self.weight = weight
        self.teacher = None if teacher is None else attach(teacher.eval())
        self._target: Tensor | None = None

    def prepare(self, model: nn.Module, inputs: dict[str, Any], schedule: Schedule) -> None:
        """Run the teacher on the same batch, unless the model is its own teacher and ``schedule`` is full."""
        self._target = None
        if schedule.is_full and self.teacher is None:
            return
        teacher = model if self.teacher is None else self.teacher.to(inputs["input_ids"].device)
        full = Schedule.full(len(decoder_layers(teacher)))
        inputs = {name: value for name, value in inputs.items() if name not in ("labels", "prompt_length")}
        inputs["use_cache"] = False
        training = teacher.training
        teacher.eval()
        with torch.no_grad(), teacher_forced(teacher, full, 1):
            self._target = teacher(**inputs).logits
        teacher.train(training)

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Return the weighted sum of cross-entropy and divergence, both means per response token."""
        loss = super().__call__(outputs, labels, num_items_in_batch)
        if self._target is None:
            return loss
        learned = labels[:, 1:] != -100
        width = learned.shape[1]
        student, target = (log_softmax(x[:, -width:][learned].float(), -1) for x in (outputs.logits, self._target))
        distance = kl_div(student, target, log_target=True, reduction="sum")
        count = len(target) if num_items_in_batch is None else num_items_in_batch
        return (1 - self.weight) * loss + self.weight * distance / count


class ExitLoss(Objective):
    """Mean loss of all exits; every step runs all layers, because the exit at depth d reads only layers below d."""

    hidden_states = True

    def __init__(self, model: PreTrainedModel) -> None:
        self.count = len(decoder_layers(model))
        self.schedule = Schedule.full(self.count)
        self.reader = read_out(model)

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Return the mean of the exits' losses, a scalar."""
        width = labels.shape[1] - 1
        early = [states[:, -width:] for states in outputs.hidden_states[1 : self.count]]
        logits = [*map(self.reader, early), outputs.logits]
        return torch.stack([token_loss(exit, labels, num_items_in_batch) for exit in logits]).mean()
