"""Train with the schedule on: each layer computes only the columns that decoding would give it (docs/training.md)."""

from __future__ import annotations

import json
import random
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.trainer_callback import ProgressCallback

from .collation import Collator, encode
from .errors import JobError, TaskError
from .files import write
from .gate import attach, teacher_forced
from .generation import generate, positions
from .objectives import Objective, response_loss
from .prompts import encode_prompts
from .schedule import Schedule
from .tasks import Example, Task
from .trained import CONFIG_KEY, entry

#: Beside the checkpoints: what makes the run what it is.
RECORD = "training.json"


class SkipTrainer(Trainer):
    """transformers' Trainer with a schedule drawn per step.

    Args:
        schedules: target speed-up -> schedule. One is drawn per optimizer step (the same on all processes); evaluation
            reports the loss of each and the task's score of the last.
        objective: what is minimised; evaluation is always cross-entropy.
        weights: how often each of ``schedules`` is drawn, relative to the others; equally if None.
        task, eval_examples: what the validation score is computed on, with ``model.generate``; None for no score.
    """

    def __init__(
        self,
        *args: Any,
        schedules: Mapping[float, Schedule],
        objective: Objective | None = None,
        weights: Sequence[float] | None = None,
        task: Task | None = None,
        eval_examples: Sequence[Example] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, compute_loss_func=self._loss, **kwargs)
        self.schedules = dict(schedules)
        self.objective = objective or Objective()
        self.weights = weights
        self.task = task
        self.eval_examples = eval_examples
        self._evaluated: Schedule | None = None
        self._tokens = 0
        self._clock = time.perf_counter()
        attach(self.model)
        self.remove_callback(ProgressCallback)
        self.add_callback(TrainingBar())

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
            return super().training_step(model, inputs, *args, **kwargs)

    def _gates(self, model: nn.Module, inputs: Mapping[str, Any]) -> AbstractContextManager[None]:
        schedule = self._evaluated or self.objective.schedule or self._drawn()
        bare = self.accelerator.unwrap_model(model)
        return teacher_forced(bare, schedule, inputs["prompt_length"])

    def _drawn(self) -> Schedule:
        """A function of the seed and the step alone, so that a resumed run draws what the killed one would have."""
        dice = random.Random(f"{self.args.seed} {self.state.global_step}")
        return dice.choices(list(self.schedules.values()), self.weights)[0]

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
        for speedup, schedule in self.schedules.items():
            self._evaluated = schedule
            metrics |= super().evaluate(*args, metric_key_prefix=f"{metric_key_prefix}_{speedup:g}x", **kwargs)
            metrics[f"{metric_key_prefix}_loss"] = metrics[f"{metric_key_prefix}_{speedup:g}x_loss"]
        if self.task is not None and self.eval_examples:
            texts = generate(
                self.accelerator.unwrap_model(self.model),
                self.processing_class,
                [example.prompt for example in self.eval_examples],
                schedule=self._evaluated,
                batch_size=self.args.eval_batch_size,
                max_new_tokens=self.task.max_new_tokens,
                do_sample=False,
            )
            scores = self.task.score([row.text for row in texts.rows], [e.references for e in self.eval_examples])
            scores = {f"{metric_key_prefix}_{name}": value for name, value in scores.items()}
            self.log(dict(scores))
            metrics |= scores
        self._evaluated = None
        self._clock, self._tokens = time.perf_counter(), 0
        return metrics


class TrainingBar(ProgressCallback):
    """One bar with the loss and the tokens per second."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Loss and rate go beside the bar, everything else (evaluation) on a line of its own."""
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix_str(f"loss {logs['loss']:.4f}, {logs['tokens_per_second']:,.0f} tokens/s")
        else:
            super().on_log(args, state, control, logs=logs, **kwargs)


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
        objective: what is minimised (:class:`~skipdecode.objectives.Distillation` for one); cross-entropy if None.
        weights: how often each schedule is drawn, relative to the others; equally if None.
        lora_rank: train adapters of this rank on all linear layers (peft), merged at the end; 0 trains all weights.
        resume: a checkpoint folder of this very run to go on from.
        record: what makes this run what it is, plain values; kept beside the checkpoints as ``training.json``, where
            :func:`newest_checkpoint` compares it.

    Returns:
        The trained model. Gates stay on; its config carries the schedule.

    Raises:
        TaskError: no training example fits the model's positions.
    """
    limit = positions(model) or sys.maxsize
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
    says = entry(schedules, method)
    if says is not None:
        setattr(model.config, CONFIG_KEY, says)
    elif hasattr(model.config, CONFIG_KEY):
        delattr(model.config, CONFIG_KEY)
    settings._n_gpu = 1  # torch's DataParallel would copy gates that point to the first GPU: use accelerate launch
    trained: Any = model
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
        data_collator=Collator(tokenizer.pad_token_id, max_length=positions(model)),
        train_dataset=rows,
        eval_dataset=held_out if len(held_out) else None,
        processing_class=tokenizer,
    )
    if record is not None and trainer.is_world_process_zero():
        Path(settings.output_dir).mkdir(parents=True, exist_ok=True)
        write(Path(settings.output_dir) / RECORD, json.dumps(record, indent=2) + "\n")
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    if lora_rank:
        model = trained.merge_and_unload()
    model.config.use_cache = True  # the Trainer turns it off
    if trainer.is_world_process_zero():
        model.save_pretrained(settings.output_dir)
        tokenizer.save_pretrained(settings.output_dir)
    return model


def newest_checkpoint(folder: Path, record: Mapping[str, Any]) -> Path | None:
    """The newest whole checkpoint in ``folder`` (a kill may have cut the very last one short), or None.

    Raises:
        JobError: it belongs to a run of which ``record`` does not hold; the message names what differs.
    """
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    if not whole:
        return None
    newest = max(whole, key=lambda path: int(path.name.split("-")[-1]))
    path = folder / RECORD
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    differs = [name.replace("_", " ") for name in record if known.get(name) != record[name]]
    if differs:
        raise JobError(
            f"{newest} is of a run with another {', '.join(differs)}: give another --output, or --fresh to drop it"
        )
    return newest


#: TrainingArguments with what SkipDecode's collator and sampler need.
arguments = partial(
    TrainingArguments,
    remove_unused_columns=False,
    prediction_loss_only=True,
    train_sampling_strategy="group_by_length",
    save_total_limit=1,
    report_to="none",
    label_names=["labels"],
)


def checkpointing_option(wanted: bool) -> dict[str, bool]:
    """TrainingArguments' name for gradient checkpointing, which transformers 5.23 changed."""
    new = "activation_checkpointing"
    return {new if new in TrainingArguments.__dataclass_fields__ else "gradient_checkpointing": True} if wanted else {}
