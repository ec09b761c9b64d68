"""Train with the schedule on: each layer computes only the columns that decoding would give it (docs/training.md)."""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.trainer_callback import ProgressCallback

from ..core.attach import attach, teacher_forced
from ..core.checkpoint_config import CONFIG_KEY, to_config_entry
from ..core.schedule import Schedule
from ..data.collation import Collator, encode
from ..data.tasks import Example, Task
from ..data.tokenization import encode_prompts
from ..errors import DivergedError, TaskError
from ..generation.generate import generate, max_positions
from ..methods.objectives import Objective, response_loss
from .callbacks import Steps, StepSeed, TrainingBar
from .checkpoints import RunFolder, writing
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
        folder: keeps the checkpoints in ``args.output_dir`` whole and says which are this run's; None: they are
            transformers' own affair.

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
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, compute_loss_func=self._loss, **kwargs)
        self.schedules = dict(schedules)
        self.objective = objective or Objective()
        self.weights = weights
        self.task = task
        self.eval_examples = eval_examples
        self.folder = folder
        self._evaluated: Schedule | None = None
        self._tokens = 0
        self._clock = time.perf_counter()
        attach(self.model)
        self.remove_callback(ProgressCallback)
        self.bar = TrainingBar()
        self.add_callback(self.bar)
        self.add_callback(StepSeed(self.args.process_index))

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The stock loss, on the columns that each layer would run while decoding."""
        gates = self._gates(model, inputs)
        inputs = dict(inputs)
        inputs["logits_to_keep"] = inputs["input_ids"].shape[1] - inputs.pop("prompt_length") + 1
        if model.training:
            self._tokens += int(inputs["attention_mask"].sum())
            if self.objective.hidden_states:
                inputs["output_hidden_states"] = True
            self.objective.prepare(self.accelerator.unwrap_model(model), inputs, self._drawn())
        with gates:
            return super().compute_loss(model, inputs, *args, **kwargs)

    def _loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        loss = self.objective if self.model.training else response_loss
        return loss(outputs, labels, num_items_in_batch)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """The stock step; the backward pass may recompute layers, so it too runs with the gates set."""
        with self._gates(model, inputs):
            loss = super().training_step(model, inputs, *args, **kwargs)
        if not torch.isfinite(loss):
            raise DivergedError(
                f"step {self.state.global_step + 1}: the loss is {loss.item()}; nothing was saved since the last "
                "checkpoint. A lower --learning-rate may help"
            )
        return loss

    def _gates(self, model: nn.Module, inputs: Mapping[str, Any]) -> AbstractContextManager[None]:
        schedule = self._evaluated or self.objective.schedule or self._drawn()
        bare = self.accelerator.unwrap_model(model)
        return teacher_forced(bare, schedule, inputs["prompt_length"])

    def _drawn(self) -> Schedule:
        """A function of the seed and the step alone, so that a resumed run draws what the killed one would have."""
        dice = random.Random(f"{self.args.seed} {self.state.global_step}")
        return dice.choices(list(self.schedules.values()), self.weights)[0]

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The stock batches of a step; none once all steps are done, where transformers would train one too many."""
        if self.state.global_step >= self.state.max_steps:
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
        name = f"checkpoint-{self.state.global_step}"
        if self.is_world_process_zero():
            self.folder.begin(name)
        self.accelerator.wait_for_everyone()
        with writing(self.folder.folder / name):
            super()._save_checkpoint(*args, **kwargs)
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            self.folder.seal(name)

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


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    schedules: Mapping[float, Schedule],
    settings: TrainingArguments,
    task: Task,
    training: Sequence[Example],
    validation: Sequence[Example] = (),
    *,
    method: str = "skipdecode",
    objective: Objective | None = None,
    weights: Sequence[float] | None = None,
    lora_rank: int = 0,
    resume: Path | None = None,
    record: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Fine-tune (or train from scratch) and save a stock Hugging Face directory to ``settings.output_dir``.

    Args:
        model, tokenizer: any decoder-only causal LM of transformers.
        schedules: target speed-up -> schedule; the fastest becomes the checkpoint's default.
        settings: transformers' own, best made by :func:`arguments`.
        task, training, validation: the data. The loss is computed on the validation examples that fit the model's
            positions, the score on those that leave room for a text.
        method: what the checkpoint's config will say it was trained by.
        objective: what is minimised (:class:`~skipdecode.methods.objectives.Distillation` for one); cross-entropy if
            None.
        weights: how often each schedule is drawn, relative to the others; equally if None.
        lora_rank: train adapters of this rank on all linear layers (peft), merged at the end; 0 trains all weights.
        resume: a checkpoint folder of this very run to go on from, as :meth:`RunFolder.newest` finds it; None: start
            anew, and remove the checkpoints of an earlier run in ``settings.output_dir``.
        record: what makes this run what it is, plain values; kept beside the checkpoints in ``training.json``, where
            :meth:`RunFolder.newest` compares it.

    Returns:
        The trained model. Gates stay on; its config carries the schedule.

    Raises:
        TaskError: no training example fits the model's positions.
        FileError: ``settings.output_dir`` holds what no training run wrote.
        DivergedError: loss or weights are no longer finite; the last checkpoint and model stay.
    """
    folder = RunFolder(settings.output_dir)
    folder.claim(model.name_or_path)
    limit = max_positions(model.config) or sys.maxsize
    lengths = map(len, encode_prompts(tokenizer, [example.prompt for example in validation])) if validation else ()
    scored = [e for e, n in zip(validation, lengths, strict=True) if n + task.max_new_tokens <= limit]
    held_out = encode(validation, tokenizer, limit)
    if not len(held_out):
        settings.eval_strategy = "no"
    rows = encode(training, tokenizer, limit)
    if not len(rows):
        raise TaskError(f"no training example fits the model's {limit} positions")
    if len(rows) < len(training):
        warnings.warn(f"{len(training) - len(rows)} training examples over {limit} tokens are left out", stacklevel=2)
    says = to_config_entry(schedules, method)
    if says is not None:
        setattr(model.config, CONFIG_KEY, says)
    elif hasattr(model.config, CONFIG_KEY):
        delattr(model.config, CONFIG_KEY)
    settings._n_gpu = 1  # torch's DataParallel would copy gates that point to the first GPU: use accelerate launch
    trained: Any = attach(model)  # before peft wraps it: the guard belongs on the model that is returned
    if lora_rank:
        from peft import LoraConfig, get_peft_model

        trained = get_peft_model(model, LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear"))
    trainer = SkipTrainer(
        model=trained,
        args=settings,
        schedules=schedules,
        objective=objective,
        weights=weights,
        task=task,
        eval_examples=scored,
        data_collator=Collator(tokenizer.pad_token_id, max_length=max_positions(model.config)),
        train_dataset=rows,
        eval_dataset=held_out if len(held_out) else None,
        processing_class=tokenizer,
        folder=folder,
    )
    if trainer.is_world_process_zero():
        folder.folder.mkdir(parents=True, exist_ok=True)
        folder.start(record or {}, resume)
    trainer.add_callback(Steps(folder))
    try:
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    finally:
        trainer.bar.close()
    if lora_rank:
        model = trained.merge_and_unload()
    model.config.use_cache = True  # the Trainer turns it off
    refuse_broken(model)
    if trainer.is_world_process_zero():
        folder.publish(lambda stage: (model.save_pretrained(stage), tokenizer.save_pretrained(stage)))
    return model


def refuse_broken(model: nn.Module) -> None:
    """Raises DivergedError if a weight is not finite."""
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise DivergedError(
                f"{name} is not finite: nothing was saved since the last checkpoint. A lower --learning-rate may help"
            )


#: TrainingArguments with what SkipDecode's collator and sampler need.
arguments = partial(
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
