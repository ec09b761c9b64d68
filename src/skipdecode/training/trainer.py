"""Train with skipping on: each layer runs only the positions that it would run in decoding (docs/training.md)."""

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
    """transformers' Trainer, which draws a schedule for each optimizer step.

    A step's examples, schedule and dropout depend on the seed and the step alone, so that a resumed run computes the
    same as an uninterrupted one.

    Args:
        schedules: schedules by target speed-up. Each optimizer step draws one, the same on all processes; evaluation
            reports the loss at each, and the task's score at the last.
        objective: the loss to minimise; evaluation always uses cross-entropy.
        weights: relative frequencies of ``schedules``; None: equal.
        task, eval_examples: the task and examples to score with ``model.generate``; None for no score.
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
        self._step: ExitStack | None = None  # closes at the end of the current training step
        self._tokens = 0
        self._clock = time.perf_counter()
        attach(self.model)
        self.remove_callback(ProgressCallback)
        self.bar = TrainingBar()
        self.add_callback(self.bar)
        self.add_callback(StepSeed(self.args.process_index))

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the loss while each layer runs only the positions that it would run in decoding."""
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
        """Run a training step. The backward pass may recompute layers, so the gates stay set until its end."""
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
        """Draw the step's schedule from the seed and the step alone, so that a resumed run draws the same."""
        dice = random.Random(f"{self.args.seed} {self.state.global_step}")
        return dice.choices(list(self.schedules.values()), self.weights)[0]

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return a step's batches; none after the last step, where transformers would train one step too many."""
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
        """Return where transformers writes its checkpoint: ``SCRAP``, from which ``folder`` moves it to its place."""
        return super()._get_output_dir(*args, **kwargs) if self.folder is None else str(self.folder.folder / SCRAP)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Omit tied weights, which no checkpoint holds twice, from the warning about missing keys."""
        tied = getattr(self.model, "all_tied_weights_keys", {})
        load_result.missing_keys[:] = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add this process's tokens per second (prompt and response, no padding) since the last log."""
        if "loss" in logs:
            now = time.perf_counter()
            logs["tokens_per_second"] = round(self._tokens / (now - self._clock), 1)
            self._tokens, self._clock = 0, now
        super().log(logs, *args, **kwargs)

    def evaluate(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> dict[str, float]:
        """Return the loss at every speed-up, and ``eval_loss`` and the task's scores at the last."""
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
    """Raise DivergedError if a weight is not finite."""
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
    report_to="none",
    label_names=["labels"],
)


def checkpointing_option(wanted: bool) -> dict[str, bool]:
    """Return gradient checkpointing as a TrainingArguments option, which transformers 5.23 renamed."""
    new = "activation_checkpointing"
    return {new if new in TrainingArguments.__dataclass_fields__ else "gradient_checkpointing": True} if wanted else {}
