"""Trainers that skip layers: each layer runs only the positions that it would run in decoding (paper, section 4)."""

import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import Trainer, TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from ..data.collator import Collator
from ..errors import DivergedError
from ..schedule import Schedule
from .callback import Skipping
from .losses import Objective, TeacherOutput


class SkipTrainer(Trainer):
    """transformers' Trainer, which draws a schedule for each optimizer step and evaluates at every speed.

    Args:
        schedules: schedules by target speed-up. All processes draw the same one.
        objective: the loss to minimise; evaluation always uses cross-entropy.
        weights: relative frequencies of ``schedules``; None: equal.

    Raises:
        DivergedError: the loss is not finite. Earlier checkpoints stay.
    """

    def __init__(
        self,
        *,
        schedules: Mapping[float, Schedule],
        objective: Objective | None = None,
        weights: Sequence[float] | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs["eval_dataset"] is None:
            kwargs["args"].eval_strategy = "no"
        super().__init__(compute_loss_func=self._loss, **kwargs)
        self.skipping = Skipping(speedups=schedules, weights=weights, seed=self.args.seed)
        self.objective = objective or Objective()
        self.stop = StopBySignal()
        self.add_callback(self.stop)
        self._attach()

    def _attach(self) -> None:
        self.skipping.attach(self.model)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        keep = inputs["input_ids"].shape[1] - inputs["prompt_length"] + 1
        more = {"output_hidden_states": True} if self.objective.hidden_states else {}
        return super()._prepare_inputs(inputs) | {"logits_to_keep": keep, "use_cache": False} | more

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Training step while each layer runs only the positions that it would run in decoding."""
        inputs = self._prepare_inputs(inputs)
        drawn = self.skipping.drawn(self.state.global_step)
        self.objective.prepare(self.accelerator.unwrap_model(model), inputs, drawn)
        with self.skipping.at(self.objective.schedule or drawn):
            loss = super().training_step(model, inputs, *args, **kwargs)
        if not torch.isfinite(loss):
            raise DivergedError(f"step {self.state.global_step + 1}: the loss is {loss.item()}: lower --learning-rate")
        return loss

    def _loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        objective = self.objective if self.model.training else Objective()
        return objective(outputs, labels, num_items_in_batch)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Batches of a step; none once all steps are done: a resumed Trainer would run one more."""
        if self.state.global_step >= self.state.max_steps:
            return [], None
        return super().get_batch_samples(*args, **kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        group = self._train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        return EpochSampler(self.train_dataset["length"], group, self)

    def evaluate(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> dict[str, float]:
        """Loss at every speed-up; that at the last is ``eval_loss`` too."""
        metrics: dict[str, float] = {}
        for speedup, schedule in self.skipping.schedules.items():
            prefix = f"{metric_key_prefix}_{speedup:g}x"
            with self.skipping.at(schedule):
                metrics |= super().evaluate(*args, metric_key_prefix=prefix, **kwargs)
            metrics[f"{metric_key_prefix}_loss"] = metrics[f"{prefix}_loss"]
        return metrics


class DistillationTrainer(SkipTrainer):
    """Trains a :class:`~skipdecode.training.losses.DistillationModel`; each step learns from its texts at every speed.

    The optimizer is Muon: in short runs it brings an adapter nearer to the full model than AdamW.
    """

    def __init__(self, **kwargs: Any) -> None:
        options = {"lr": kwargs["args"].learning_rate, "adjust_lr_fn": "match_rms_adamw"}
        super().__init__(optimizer_cls_and_kwargs=(torch.optim.Muon, options), **kwargs)
        self._learned: tuple[TeacherOutput, float] | None = None

    def _attach(self) -> None:
        pass  # the frozen model has gates

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """KL divergence from the full model with the schedule that is learned now, or evaluated."""
        teacher, share = self._learned or (self.accelerator.unwrap_model(model).teacher_output(inputs), 1.0)
        loss = share * model(teacher, self.skipping.current, num_items_in_batch)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # the mean over processes follows
        return (loss, {"loss": loss}) if return_outputs else loss

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Run the full model once, then each schedule forward and back, to hold one graph at a time."""
        teacher = self.accelerator.unwrap_model(model).teacher_output(self._prepare_inputs(inputs))
        schedules = self.skipping.schedules.values()
        weights = self.skipping.weights or [1.0] * len(schedules)
        losses = []
        for schedule, weight in zip(schedules, weights, strict=True):
            if weight:
                self._learned = teacher, weight / sum(weights)
                self.objective.schedule = schedule
                losses.append(super().training_step(model, inputs, *args, **kwargs))
        self._learned = None
        return torch.stack(losses).sum()


class TextCollator(Collator):
    """Collator for self-generated texts: their first token, from the prompt's pass, is no label."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Batch as a Collator makes it; the Trainer counts only tokens that can be learned from."""
        batch = super().__call__(rows)
        batch["labels"][:, 1] = -100
        return batch


class EpochSampler(LengthGroupedSampler):
    """Groups examples by length, in an order that a resumed run has too: it depends on the seed and the epoch alone."""

    def __init__(self, lengths: Sequence[int], group: int, trainer: Trainer) -> None:
        super().__init__(group, lengths=list(lengths))
        self.trainer = trainer  # accelerate forwards no set_epoch while it skips batches

    def __iter__(self) -> Iterator[int]:
        dice = random.Random(f"order {self.trainer.args.seed} {int(self.trainer.state.epoch or 0)}")
        self.generator = torch.Generator().manual_seed(dice.getrandbits(32))
        return super().__iter__()


class StopBySignal(TrainerCallback):
    """Context in which SIGINT or SIGTERM end training with a checkpoint after the current step."""

    number: int | None = None

    def __enter__(self) -> None:
        self.before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        self.number = number
        self.__exit__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and stop, if a signal came."""
        if self.number is not None:
            control.should_save = control.should_training_stop = True
