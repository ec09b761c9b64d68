"""Losses of training: cross-entropy, distillation from all layers, all exits, and the divergence of adapters."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from ..model.adapter import Adapter
from ..model.config import num_layers
from ..model.teacher_forcing import PrefilledBatch
from ..schedule import Schedule
from .read_out import read_out

#: Positions whose logits are compared at a time.
POSITIONS = 64


def token_loss(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Mean cross-entropy of response tokens over the accumulated batch.

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
    """Loss that training minimises: the paper's, cross-entropy of the response; base class of other losses."""

    #: Whether the loss reads ``outputs.hidden_states``.
    hidden_states = False
    #: Schedule that every training step runs in place of the drawn one; None: the drawn one.
    schedule: Schedule | None = None

    def prepare(self, model: nn.Module, inputs: dict[str, Any], schedule: Schedule) -> None:
        """Prepare the loss before a training pass over ``inputs`` with ``schedule``, while no layer is skipped."""

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Loss of a batch, a scalar; :func:`token_loss` explains the labels."""
        return token_loss(outputs.logits, labels, num_items_in_batch)


class Distillation(Objective):
    """``(1 - weight)`` times cross-entropy plus ``weight`` times the KL divergence from a model that runs all layers.

    Args:
        weight: above 0, at most 1.
        teacher: another model of the same vocabulary. None: the trained model with all its layers, without dropout;
            cross-entropy alone counts at 1x.
    """

    def __init__(self, weight: float, teacher: nn.Module | None = None) -> None:
        self.weight = weight
        self.teacher = None if teacher is None else teacher.eval()
        self._target: Tensor | None = None

    def prepare(self, model: nn.Module, inputs: dict[str, Any], schedule: Schedule) -> None:
        """Run the teacher on the same batch."""
        self._target = None
        if schedule.is_full and self.teacher is None:
            return
        teacher = model if self.teacher is None else self.teacher.to(inputs["input_ids"].device)
        inputs = {name: value for name, value in inputs.items() if name not in ("labels", "prompt_length")}
        training = teacher.training
        teacher.eval()
        with torch.no_grad():
            self._target = teacher(**inputs).logits
        teacher.train(training)

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Weighted sum of cross-entropy and divergence, both means per response token."""
        loss = super().__call__(outputs, labels, num_items_in_batch)
        if self._target is None:
            return loss
        learned = labels[:, 1:] != -100
        width = learned.shape[1]
        student = log_softmax(outputs.logits[:, -width:][learned].float(), -1)
        target = log_softmax(self._target[:, -width:][learned].float(), -1)
        distance = kl_div(student, target, log_target=True, reduction="sum")
        count = len(target) if num_items_in_batch is None else num_items_in_batch
        return (1 - self.weight) * loss + self.weight * distance / count


class ExitLoss(Objective):
    """Mean loss of all exits, with which multi-layer exit trains; every step runs all layers.

    Args:
        model: the trained model.
        share: of the response tokens, drawn anew for each exit but the last: logits of all would take the memory and
            the time of as many LM heads. The expected loss is the same.
    """

    hidden_states = True

    def __init__(self, model: Any, share: float = 1.0) -> None:
        self.count = num_layers(model.config)
        self.schedule = Schedule.full(self.count)  # the exit at depth d reads only layers below d
        self.reader = read_out(model)
        self.share = share

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Mean of the exits' losses, a scalar."""
        loss = token_loss(outputs.logits, labels, num_items_in_batch)
        labels = labels[:, 1:]
        learned = labels != -100
        count = learned.sum() if num_items_in_batch is None else num_items_in_batch
        for states in outputs.hidden_states[1 : self.count]:
            chosen = learned & (torch.rand(labels.shape, device=labels.device) < self.share)
            logits = self.reader(states[:, -labels.shape[1] :][chosen]).float()
            loss = loss + cross_entropy(logits, labels[chosen], reduction="sum") / self.share / count
        return loss / self.count


class TeacherOutput(NamedTuple):
    """Output of the full model on a batch of texts: logits (batch, R, vocabulary)."""

    batch: PrefilledBatch
    logits: Tensor


class DistillationModel(nn.Module):
    """An adapter that learns from the frozen model it acts in; the Trainer trains and saves the adapter alone.

    Args:
        model: the frozen causal LM, with gates and ``adapter`` attached.
        adapter: its matrices learn. Biases stay as they are, since the optimizer Muon takes matrices alone.
        fixed: schedules whose output stays as it is: nothing that acts in them learns.
    """

    def __init__(self, model: nn.Module, adapter: Adapter, fixed: Iterable[Schedule] = ()) -> None:
        super().__init__()
        self.adapter = adapter
        for weight in adapter.parameters():
            weight.requires_grad_(weight.ndim == 2)
        for layers in (layers for schedule in fixed for layers in schedule.step_layer_sets):
            for module in (*adapter.changes(layers).values(), *adapter.loras_at(layers).values()):
                module.requires_grad_(False)
        self.config = model.config  # the Trainer reads it
        self._model = (model.eval().requires_grad_(False),)  # in a tuple: no submodule

    @property
    def model(self) -> nn.Module:
        """The frozen model."""
        return self._model[0]

    @torch.no_grad()
    def teacher_output(self, batch: Mapping[str, Any]) -> TeacherOutput:
        """Output of the full model on a batch that :class:`~skipdecode.data.collator.Collator` made.

        A text's first token is the prompt's pass, which runs all layers: nothing can be learned from it.
        """
        prefilled = PrefilledBatch(self.model, batch)
        return TeacherOutput(prefilled, prefilled.logits())

    def forward(self, teacher: TeacherOutput, schedule: Schedule, num_items_in_batch: Any = None) -> Tensor:
        """Mean KL divergence of a schedule from the full model, in nats per text token, over all accumulated ones."""
        counted = teacher.batch.counted
        count = counted.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return KLDivergence.apply(teacher.batch.logits(schedule), teacher.logits, counted) / count


class KLDivergence(torch.autograd.Function):
    """Sum over the counted positions (batch, R) of the KL divergence of ``logits`` from ``target``.

    Both are (batch, R, vocabulary). A few positions at a time stay in a CPU's cache, and a GPU's memory takes no copies
    of all logits. With the gradient written at once, a step takes a fifth less time on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, counted: Tensor) -> Tensor:
        """Sum in nats, a scalar; the gradient is kept, in the dtype of the logits."""
        gradient = torch.empty_like(logits)
        total = torch.zeros((), device=logits.device)
        parts = [each.flatten(0, 1).split(POSITIONS) for each in (logits, target, gradient)]
        for own, full, change, mask in zip(*parts, counted.flatten().split(POSITIONS), strict=True):
            own, full = own.float().log_softmax(-1), full.float().log_softmax(-1)
            likely = full.exp()
            total += (likely * (full - own)).sum(-1)[mask].sum()
            change.copy_((own.exp() - likely) * mask[:, None])
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient of the logits alone."""
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0].to(gradient.dtype), None, None
