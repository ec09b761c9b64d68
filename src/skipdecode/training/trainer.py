"""Train with skipping on: each layer runs only the positions that it would run in decoding (docs/training.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import ProgressCallback

from ..errors import DivergedError, UsageError
from ..schedule import Schedule
from .callback import Skipping
from .callbacks import StepSeed, TrainingBar
from .checkpoints import STAGING, RunFolder, writing
from .learner import FullDepth
from .losses import Objective
from .sampler import LengthGrouped


class SkipTrainer(Trainer):
    """transformers' Trainer, which draws a schedule for each optimizer step.

    A step's examples, schedule and dropout depend on the seed and the step alone, so that a resumed run computes the
    same as an uninterrupted one.

    Args:
        schedules: schedules by target speed-up. Each optimizer step draws one, the same on all processes; evaluation
            reports the loss at each.
        objective: the loss to minimise; evaluation always uses cross-entropy.
        weights: relative frequencies of ``schedules``; None: equal.
        folder: protects the checkpoints in ``args.output_dir`` against kills; None: transformers writes them alone.
        record: the run's identity, stored in each checkpoint in ``folder``.

    Raises:
        DivergedError: the loss, or a weight about to be saved, is not finite. Earlier checkpoints stay.
    """

    def __init__(
        self,
        *args: Any,
        schedules: Mapping[float, Schedule],
        objective: Objective | None = None,
        weights: Sequence[float] | None = None,
        folder: RunFolder | None = None,
        record: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, compute_loss_func=self._loss, **kwargs)
        self.skipping = Skipping(speedups=schedules, weights=weights, seed=self.args.seed)
        self.objective = objective or Objective()
        self.folder = folder
        self.record = record or {}
        self._evaluated: Schedule | None = None
        self._step: ExitStack | None = None  # closes at the end of the current training step
        self._attach()
        self.bar = TrainingBar()
        if self.pop_callback(ProgressCallback) is not None:  # else disable_tqdm is set
            self.add_callback(self.bar)
        self.add_callback(StepSeed())

    def _attach(self) -> None:
        self.skipping.attach(self.model)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the loss while each layer runs only the positions that it would run in decoding."""
        keep = inputs["input_ids"].shape[1] - inputs["prompt_length"] + 1
        inputs = inputs | {"logits_to_keep": keep, "use_cache": False}
        drawn = self.skipping.drawn(self.state.global_step)
        if model.training:
            if self.objective.hidden_states:
                inputs["output_hidden_states"] = True
            self.objective.prepare(self.accelerator.unwrap_model(model), inputs, drawn)
        with ExitStack() as here:
            (self._step or here).enter_context(self.skipping.at(self._evaluated or self.objective.schedule or drawn))
            return super().compute_loss(model, inputs, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run a training step. The backward pass may recompute layers, so the gates stay set until its end."""
        with ExitStack() as self._step:
            try:
                loss = super().training_step(*args, **kwargs)
            finally:
                self._step = None
        if not torch.isfinite(loss):
            raise DivergedError(
                f"step {self.state.global_step + 1}: the loss is {loss.item()}; nothing was saved since the last "
                "checkpoint. A lower --learning-rate may help, on a GPU --attn-implementation eager"
            )
        return loss

    def _loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        objective = self.objective if self.model.training else Objective()
        return objective(outputs, labels, num_items_in_batch)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return a step's batches; none after the last step, where transformers would train one step too many.

        Raises UsageError if the checkpoint resumed from is past the last step.
        """
        if self.state.global_step > self.state.max_steps:
            raise UsageError(
                f"{self.args.output_dir} holds a checkpoint of step {self.state.global_step}, past the "
                f"{self.state.max_steps} asked for: give another --output, or --no-resume to drop it"
            )
        if self.state.global_step == self.state.max_steps:
            return [], None
        return super().get_batch_samples(*args, **kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy != "group_by_length" or "length" not in dataset.column_names:
            return super()._get_train_sampler(train_dataset)
        group = self._train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        return LengthGrouped(dataset["length"], group, self.args.seed, lambda: int(self.state.epoch or 0))

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        refuse_nonfinite(self.model)
        if self.folder is None:
            return super()._save_checkpoint(*args, **kwargs)
        if self.is_world_process_zero():
            self.folder.new_staging()
        self.accelerator.wait_for_everyone()
        with writing(self.folder.folder):
            super()._save_checkpoint(*args, **kwargs)
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            self.folder.keep(f"checkpoint-{self.state.global_step}", self.record)

    def _get_output_dir(self, *args: Any, **kwargs: Any) -> str:
        """Return where transformers writes its checkpoint: ``STAGING``, from which ``folder`` moves it to its place."""
        return super()._get_output_dir(*args, **kwargs) if self.folder is None else str(self.folder.folder / STAGING)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Omit tied weights, which no checkpoint holds twice, from the warning about missing keys."""
        tied = getattr(self.model, "all_tied_weights_keys", {})
        load_result.missing_keys[:] = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result)

    def evaluate(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> dict[str, float]:
        """Return the loss at every speed-up; that at the last is ``eval_loss`` too."""
        metrics: dict[str, float] = {}
        try:
            for speedup, schedule in self.skipping.schedules.items():
                self._evaluated = schedule
                metrics |= super().evaluate(*args, metric_key_prefix=f"{metric_key_prefix}_{speedup:g}x", **kwargs)
                metrics[f"{metric_key_prefix}_loss"] = metrics[f"{metric_key_prefix}_{speedup:g}x_loss"]
        finally:
            self._evaluated = None
        return metrics


class AdapterTrainer(SkipTrainer):
    """Trains an :class:`~skipdecode.training.learner.AdapterLearner`; evaluation reports its loss at each speed-up.

    Each step learns from its texts at every speed-up, so that their prompts and full depth are computed once.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # In short runs Muon brings an adapter nearer to full depth than AdamW (docs/adapter_results.md).
        options = {"lr": kwargs["args"].learning_rate, "adjust_lr_fn": "match_rms_adamw"}
        super().__init__(*args, optimizer_cls_and_kwargs=(torch.optim.Muon, options), **kwargs)
        self._learning: tuple[FullDepth, Schedule, float] | None = None

    def _attach(self) -> None:
        """Do nothing: the learner's model has gates."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute the distance from full depth with the schedule that is learnt now, or evaluated."""
        if self._learning is not None:
            full, schedule, share = self._learning
            return share * self._over_processes(model(full, schedule, num_items_in_batch), num_items_in_batch)
        learner = self.accelerator.unwrap_model(model)
        loss = self._over_processes(
            model(learner.full_depth(inputs), self._evaluated, num_items_in_batch), num_items_in_batch
        )
        return (loss, {"loss": loss}) if return_outputs else loss

    def _over_processes(self, loss: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        """Return the loss for a mean over processes, where its tokens were counted over all of them."""
        counted = self.args.average_tokens_across_devices and num_items_in_batch is not None
        return loss * self.accelerator.num_processes if counted else loss

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Run full depth once; then forward and back with one schedule after another, to hold one graph at a time."""
        model.train()
        learner, schedules = self.accelerator.unwrap_model(model), self.skipping.schedules.values()
        full = learner.full_depth(self._prepare_inputs(inputs))
        weights = self.skipping.weights or [1.0] * len(schedules)
        losses = []
        for schedule, weight in zip(schedules, weights, strict=True):
            if weight:
                self._learning = full, schedule, weight / sum(weights)
                losses.append(super().training_step(model, inputs, *args, **kwargs))
        self._learning = None
        return torch.stack(losses).sum()


def refuse_nonfinite(model: nn.Module) -> None:
    """Raise DivergedError if a parameter holds a value that is not finite."""
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise DivergedError(
                f"{name} is not finite: nothing was saved since the last checkpoint. A lower --learning-rate may help"
            )


#: TrainingArguments with the values that SkipDecode's collator and sampler need.
training_args = partial(
    TrainingArguments,
    remove_unused_columns=False,
    prediction_loss_only=True,
    train_sampling_strategy="group_by_length",
    logging_nan_inf_filter=False,  # log a NaN loss as it is: training_step raises on it
    include_num_input_tokens_seen="non_padding",  # logs tokens per second
    label_names=["labels"],
)


def checkpointing_option(wanted: bool) -> dict[str, bool]:
    """Return TrainingArguments' option for gradient checkpointing, which transformers 5.23 renamed; {} if unwanted."""
    new = "activation_checkpointing"
    return {new if new in TrainingArguments.__dataclass_fields__ else "gradient_checkpointing": True} if wanted else {}
