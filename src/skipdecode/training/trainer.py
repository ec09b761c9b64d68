"""Train with the schedule on: each layer computes only the columns that decoding would give it (docs/training.md)."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import ProgressCallback

from ..core.attach import attach, teacher_forced
from ..core.schedule import Schedule
from ..data.tasks import Example, Task
from ..errors import DivergedError, JobError
from ..generation.generate import generate
from ..methods.objectives import Objective, response_loss
from .callbacks import StepSeed, TrainingBar
from .checkpoints import SCRAP, RunFolder, writing
from .sampler import LengthGrouped


class SkipTrainer(Trainer):
    """transformers' Trainer with a schedule drawn per step.

    Rows, schedule and dropout of a step are functions of the seed and the step alone, so that a resumed run goes on as
    if it had never stopped.

    Args:
        schedules: target speed-up -> schedule. One is drawn per optimizer step (the same on all processes); evaluation
            reports the loss of each and the task's score of the last.
        objective: what is minimised; evaluation is always cross-entropy.
        weights: how often each of ``schedules`` is drawn, relative to the others; equally if None.
        task, eval_examples: what the validation score is computed on, with ``model.generate``; None for no score.
        folder: keeps the checkpoints in ``args.output_dir`` whole; None: they are transformers' own affair.
        record: what makes the run what it is, which each checkpoint in ``folder`` says.

    Raises:
        DivergedError: the loss, or a weight about to be saved, is no longer finite. What was saved before stays.
    """

    def __init__(
        self,
        *args: Any,
        schedules: Mapping[float, Schedule],
        objective: Objective | None = None,
        weights: Sequence[float] | None = None,
        task: Task | None = None,
        eval_examples: Sequence[Example] = (),
        folder: RunFolder | None = None,
        record: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, compute_loss_func=self._loss, **kwargs)
        self.schedules = dict(schedules)
        self.objective = objective or Objective()
        self.weights = weights
        self.task = task
        self.eval_examples = eval_examples
        self.folder = folder
        self.record = record or {}
        self._evaluated: Schedule | None = None
        self._step: ExitStack | None = None  # what ends with the training step under way
        self._tokens = 0
        self._clock = time.perf_counter()
        attach(self.model)
        self.remove_callback(ProgressCallback)
        self.bar = TrainingBar()
        self.add_callback(self.bar)
        self.add_callback(StepSeed(self.args.process_index))

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The stock loss, on the positions that each layer would run while decoding."""
        prompt_length = inputs["prompt_length"]
        inputs = {name: value for name, value in inputs.items() if name != "prompt_length"}
        inputs["logits_to_keep"] = inputs["input_ids"].shape[1] - prompt_length + 1
        inputs["use_cache"] = False
        bare = self.accelerator.unwrap_model(model)
        schedule = self._evaluated or self.objective.schedule or self._drawn()
        if model.training:
            self._tokens += int(inputs["attention_mask"].sum())
            if self.objective.hidden_states:
                inputs["output_hidden_states"] = True
            self.objective.prepare(bare, inputs, self._drawn())
        with ExitStack() as here:
            (self._step or here).enter_context(teacher_forced(bare, schedule, prompt_length))
            return super().compute_loss(model, inputs, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """The stock step. The backward pass may recompute layers, so the gates stay set until it is over."""
        with ExitStack() as self._step:
            try:
                loss = super().training_step(*args, **kwargs)
            finally:
                self._step = None
        if not torch.isfinite(loss):
            raise DivergedError(
                f"step {self.state.global_step + 1}: the loss is {loss.item()}; nothing was saved since the last "
                "checkpoint. A lower --learning-rate may help"
            )
        return loss

    def _loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        loss = self.objective if self.model.training else response_loss
        return loss(outputs, labels, num_items_in_batch)

    def _drawn(self) -> Schedule:
        """A function of the seed and the step alone, so that a resumed run draws what the killed one would have."""
        dice = random.Random(f"{self.args.seed} {self.state.global_step}")
        return dice.choices(list(self.schedules.values()), self.weights)[0]

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The stock batches of a step; none once all steps are done, where transformers would train one too many."""
        if self.state.global_step > self.state.max_steps:
            raise JobError(
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
        refuse_broken(self.model)
        if self.folder is None:
            return super()._save_checkpoint(*args, **kwargs)
        if self.is_world_process_zero():
            self.folder.new_scrap()
        self.accelerator.wait_for_everyone()
        with writing(self.folder.folder):
            super()._save_checkpoint(*args, **kwargs)
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            self.folder.keep(f"checkpoint-{self.state.global_step}", self.record)

    def _get_output_dir(self, *args: Any, **kwargs: Any) -> str:
        """Where transformers writes its checkpoint: not yet in its place."""
        return super()._get_output_dir(*args, **kwargs) if self.folder is None else str(self.folder.folder / SCRAP)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Says nothing of the second names of tied weights, which no checkpoint holds."""
        tied = getattr(self.model, "all_tied_weights_keys", {})
        load_result.missing_keys[:] = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds this process's tokens (prompt and response, no padding) per second since the last log."""
        if "loss" in logs:
            now = time.perf_counter()
            logs["tokens_per_second"] = round(self._tokens / (now - self._clock), 1)
            self._tokens, self._clock = 0, now
        super().log(logs, *args, **kwargs)

    def evaluate(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> dict[str, float]:
        """Loss at every speed-up (``eval_loss`` at the last), and the task's score there."""
        metrics: dict[str, float] = {}
        scores: dict[str, float] = {}
        try:
            for speedup, schedule in self.schedules.items():
                self._evaluated = schedule
                metrics |= super().evaluate(*args, metric_key_prefix=f"{metric_key_prefix}_{speedup:g}x", **kwargs)
                metrics[f"{metric_key_prefix}_loss"] = metrics[f"{metric_key_prefix}_{speedup:g}x_loss"]
            if self.task is not None and self.eval_examples:
                scores = self._score(self.task, schedule)
                scores = {f"{metric_key_prefix}_{name}": value for name, value in scores.items()}
                self.log(dict(scores))
                metrics |= scores
            shown = [f"{name} {metrics[name]:.4g}" for name in metrics if name.endswith("x_loss")]
            shown += [f"{name} {value:.4g}" for name, value in scores.items()]
            self.bar.write(f"step {self.state.global_step:,}: {', '.join(shown)}")
        finally:
            self._evaluated = None
            self._clock, self._tokens = time.perf_counter(), 0
        return metrics

    def _score(self, task: Task, schedule: Schedule) -> dict[str, float]:
        texts = generate(
            self.accelerator.unwrap_model(self.model),
            self.processing_class,
            [example.prompt for example in self.eval_examples],
            schedule=schedule,
            batch_size=self.args.eval_batch_size,
            max_new_tokens=task.max_new_tokens,
            do_sample=False,
        )
        return task.score([row.text for row in texts.completions], [e.references for e in self.eval_examples])


def refuse_broken(model: nn.Module) -> None:
    """Raises DivergedError if a weight is not finite."""
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise DivergedError(
                f"{name} is not finite: nothing was saved since the last checkpoint. A lower --learning-rate may help"
            )


#: TrainingArguments with what SkipDecode's collator and sampler need.
training_args = partial(
    TrainingArguments,
    remove_unused_columns=False,
    prediction_loss_only=True,
    train_sampling_strategy="group_by_length",
    logging_nan_inf_filter=False,  # a loss that is not finite is an end, not a gap
    report_to="none",
    label_names=["labels"],
)


def checkpointing_option(wanted: bool) -> dict[str, bool]:
    """TrainingArguments' name for gradient checkpointing, which transformers 5.23 changed."""
    new = "activation_checkpointing"
    return {new if new in TrainingArguments.__dataclass_fields__ else "gradient_checkpointing": True} if wanted else {}
