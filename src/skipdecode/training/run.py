"""Run a training plan from loading the data to saving the model: the code behind ``skipdecode train``."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from ..core.attach import attach
from ..core.checkpoint_config import CONFIG_KEY, layer_count, schedules_of, to_config_entry
from ..core.schedule import Schedule
from ..data.collation import Collator, encode
from ..data.tasks import Example
from ..errors import JobError, TaskError
from ..generation.generate import max_positions
from ..methods import get_method
from ..methods.objectives import Distillation, Objective
from ..planning.fitting import batch_lengths
from ..planning.resolve import method_schedule, new_schedule
from ..provenance import fingerprint, identity
from ..weights import loading
from .callbacks import StopBySignal
from .checkpoints import SCRAP, RunFolder, run_folder, writing
from .plan import TrainingPlan
from .trainer import SkipTrainer, checkpointing_option, refuse_broken, training_args

logger = logging.getLogger(__name__)

#: Number of training responses that schedules are fitted to.
MEASURED = 5000
#: Optimizer steps between reports of the loss.
LOGGED = 10


def train(plan: TrainingPlan, *, resume: bool = True, say: Callable[[str], object] = logger.warning) -> None:
    """Train a model as ``plan`` says, and save it and ``training.json`` (the plan) in ``plan.output``.

    A stopped run resumes from its newest undamaged checkpoint, and ends with the weights of an uninterrupted run.

    Args:
        plan: the run.
        resume: False starts anew, and deletes the run's checkpoints in ``plan.output``.
        say: receives messages for the user.

    Raises:
        UsageError, ScheduleError: the plan does not fit the model.
        TaskError: the data is missing, does not fit the task, or is longer than the model's positions.
        ModelError: the model or teacher is missing, is damaged, or cannot skip layers.
        JobError: another process trains in the folder, its checkpoints belong to another run, or completing
            a killed run's save has just replaced the model to be trained.
        FileError: the folder holds a model or checkpoints that no training run wrote.
        DivergedError: the loss or a weight is not finite; the last checkpoint and model stay.
    """
    if os.environ.get("RANK", "0") != "0":
        say = _silent  # only the first process prints
    task = plan.get_task()
    training = task.read(Path(plan.data), "train")
    validation = task.read(Path(plan.data), "validation")[: plan.max_eval_samples] if plan.eval_steps else []
    if not training:
        raise TaskError(f"{plan.data} holds no training rows")
    with run_folder(plan.output, plan.model) as folder:
        if folder.finished:
            say(f"{plan.output}: a save that a kill had cut short was finished")
            if plan.model is not None and folder.is_folder_of(plan.model):
                raise JobError(f"{plan.output} holds the trained model now: start again to train that one further")
        # Check before loading weights, so that a wrong option fails at once.
        config = _read_config(plan)
        plan.check(config)
        args = make_args(plan)
        model, tokenizer = _load(plan, config, training)
        limit = max_positions(model.config) or sys.maxsize
        rows = encode(training, tokenizer, limit)
        if not len(rows):
            raise TaskError(f"no training example fits the model's {limit} positions")
        held_out, scored = _held_out(validation, tokenizer, limit, task.max_new_tokens)
        for what, count in (("training", len(training) - len(rows)), ("validation", len(validation) - len(held_out))):
            if count:
                say(f"{count:,} {what} rows are left out: they have over {limit:,} tokens, the model's positions")
        if not len(held_out):
            say("no validation data, or --eval-steps 0: nothing will be evaluated")
            args.eval_strategy = "no"
        schedules = _schedules(plan, model.config, rows, task.max_new_tokens, say)
        record = _record(plan, model, tokenizer, training, schedules, args)
        torch.manual_seed(plan.seed)
        model = get_method(plan.method).prepare(model, plan.budgets[0])
        checkpoint = folder.newest(record, say) if resume else None
        if checkpoint is not None:
            say(f"going on from {checkpoint}")
        fine_tune(
            model.train(),
            tokenizer,
            plan,
            folder,
            checkpoint,
            say,
            args=args,
            schedules=schedules,
            train_dataset=rows,
            eval_dataset=held_out if len(held_out) else None,
            record=record,
            objective=_objective(plan, model, schedules),
            weights=plan.weights,
            task=task,
            eval_examples=scored,
        )
        say(f"saved to {plan.output}")


def fine_tune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    plan: TrainingPlan,
    folder: RunFolder,
    checkpoint: Path | None,
    say: Callable[[str], object],
    **options: Any,
) -> PreTrainedModel:
    """Train ``model``, from ``checkpoint`` if there is one, and save it to ``folder``.

    Args:
        options: keyword arguments of :class:`SkipTrainer`.

    Returns:
        The trained model, with gates on its layers and the schedules in its config.
    """
    entry = to_config_entry(options["schedules"], plan.method)
    if entry is not None:
        setattr(model.config, CONFIG_KEY, entry)
    elif hasattr(model.config, CONFIG_KEY):
        delattr(model.config, CONFIG_KEY)
    options["args"]._n_gpu = 1  # no DataParallel: its copies' gates would point to the first GPU
    trained: Any = attach(model)  # before peft wraps it: the guard belongs on the model that is returned
    if plan.lora_rank:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=plan.lora_rank, lora_alpha=2 * plan.lora_rank, target_modules="all-linear")
        trained = get_peft_model(model, config)
    collator = Collator(tokenizer.pad_token_id, max_length=max_positions(model.config))
    trainer = SkipTrainer(model=trained, data_collator=collator, processing_class=tokenizer, folder=folder, **options)
    first = trainer.is_world_process_zero()
    trainer.accelerator.wait_for_everyone()  # start() deletes checkpoints: all processes have chosen theirs by now
    if first:
        folder.start(plan.to_dict(), checkpoint)
    stop = StopBySignal(trainer.accelerator, trainer.bar.write)
    trainer.add_callback(stop)
    try:
        with stop:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        trainer.bar.close()
    if collator.cut:
        say(f"{collator.cut} responses lost their ends: beside a longer prompt they passed the model's positions")
    model.config.use_cache = True  # the Trainer turns it off
    if plan.lora_rank:
        if first:
            with writing(folder.folder):
                trained.save_pretrained(folder.new_scrap())
        model = trained.merge_and_unload()
    refuse_broken(model)

    def save(stage: Path) -> None:
        model.save_pretrained(stage)
        tokenizer.save_pretrained(stage)
        if plan.lora_rank:
            os.replace(folder.folder / SCRAP, stage / "adapter")

    if first:
        folder.publish(save)
    return model


#: Options with the same name in TrainingArguments.
SAME = (
    "num_train_epochs gradient_accumulation_steps learning_rate lr_scheduler_type warmup_steps weight_decay adam_beta2 "
    "bf16 save_steps eval_steps seed"
).split()


def make_args(plan: TrainingPlan) -> TrainingArguments:
    """Convert the plan to TrainingArguments."""
    return training_args(
        output_dir=plan.output,
        max_steps=plan.max_steps or -1,
        per_device_train_batch_size=plan.batch_size,
        per_device_eval_batch_size=plan.batch_size,
        use_cpu=not torch.accelerator.is_available(),
        logging_steps=LOGGED,
        report_to=list(plan.report_to),
        eval_strategy="steps" if plan.eval_steps else "no",
        **{name: getattr(plan, name) for name in SAME},
        **checkpointing_option(plan.gradient_checkpointing),
    )


def _silent(line: str) -> None:
    pass


def _read_config(plan: TrainingPlan) -> Any:
    return loading.new_config(Path(plan.from_config)) if plan.from_config else loading.read_config(str(plan.model))


def _load(
    plan: TrainingPlan, config: Any, training: Sequence[Example]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load or create the model and tokenizer; check the teacher's vocabulary before a checkpoint is read."""
    attention = plan.attn_implementation
    if plan.from_config:
        texts = [f"{example.prompt} {example.references[0]}" for example in training]
        model, tokenizer = loading.from_config(Path(plan.from_config), texts, plan.tokenizer, attention, plan.seed)
        config = model.config
    if plan.teacher:
        plan.check_teacher(config, loading.read_config(plan.teacher))
    if not plan.from_config:
        # Weights stay float32, also with --bf16; the Trainer moves them to the device.
        model, tokenizer = loading.load(str(plan.model), dtype="float32", device="cpu", attention=attention)
    return model, tokenizer


def _held_out(
    validation: Sequence[Example], tokenizer: PreTrainedTokenizerBase, limit: int, max_new_tokens: int
) -> tuple[Dataset, list[Example]]:
    """Return validation data of at most ``limit`` tokens for the loss, and the examples with room to generate."""
    prompts = [len(row["prompt_ids"]) for row in encode(validation, tokenizer)]
    scored = [e for e, tokens in zip(validation, prompts, strict=True) if tokens + max_new_tokens <= limit]
    return encode(validation, tokenizer, limit), scored


def _schedules(
    plan: TrainingPlan, config: Any, rows: Dataset, max_new_tokens: int, say: Callable[[str], object]
) -> dict[float, Schedule]:
    """Return the schedule to train for at each target speed-up."""

    @cache
    def measure() -> list[int]:
        responses = rows[:MEASURED]["response_ids"]
        return batch_lengths([min(len(ids), max_new_tokens) for ids in responses], plan.batch_size)

    def schedule(speedup: float) -> Schedule:
        if plan.schedule is not None:
            return plan.schedule.check_layers(layer_count(config))
        if plan.lengths is None and plan.horizon is None:
            return method_schedule(get_method(plan.method), config, speedup, measure, **plan.style)
        basis, options = plan.lengths or (), {"horizon": plan.horizon, **plan.style}
        return new_schedule(config, speedup, basis, method=get_method(plan.method), **options)

    schedules = {speedup: schedule(speedup) for speedup in plan.budgets}
    kept = [k for k, schedule in schedules_of(config, plan.method).items() if schedules.get(k) == schedule]
    if kept:
        which = ", ".join(f"{k:g}x" for k in kept)
        say(f"{plan.model} brings schedules for {which}: they stay as they are (--lengths fits new ones)")
    return schedules


def _objective(plan: TrainingPlan, model: PreTrainedModel, schedules: Mapping[float, Schedule]) -> Objective | None:
    """Return the loss to minimise, and load its teacher; None for cross-entropy."""
    if not plan.distill_weight:
        return get_method(plan.method).objective(model, schedules)
    teacher = loading.load(plan.teacher, dtype="float32", device="cpu")[0] if plan.teacher else None
    return Distillation(plan.distill_weight, teacher)


def _record(
    plan: TrainingPlan,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    training: Sequence[Example],
    schedules: Mapping[float, Schedule],
    args: TrainingArguments,
) -> dict[str, Any]:
    """Return the run's identity: a checkpoint is resumed only by a run in which all of it is equal."""
    teacher = plan.teacher and fingerprint(identity(loading.resolve(plan.teacher)))
    if plan.from_config:
        start: Any = _read_config(plan).to_dict()
    else:  # a hub name does not identify the version
        start = [identity(loading.resolve(str(plan.model))), getattr(model.config, "_commit_hash", None)]
    return {
        "model": fingerprint(start),
        "tokenizer": fingerprint(*vocabulary(tokenizer)),
        "data": fingerprint(*map(asdict, training)),
        "method": plan.method,
        "budgets": [[k, schedule.to_dict()] for k, schedule in schedules.items()],  # the draw depends on the order
        "weights": plan.weights and list(plan.weights),
        "distillation": [plan.distill_weight, teacher],
        "batch": [plan.batch_size, plan.gradient_accumulation_steps, args.world_size],
        "learning_rate": [plan.learning_rate, plan.lr_scheduler_type, plan.warmup_steps],
        "optimizer": [plan.weight_decay, plan.adam_beta2],
        "lora": plan.lora_rank,
        "bf16": plan.bf16,
        "attention": plan.attn_implementation,
        "seed": plan.seed,
    }


def vocabulary(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Return everything of a tokenizer that determines the token ids of a text or chat."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    words = tokenizer.get_vocab() if fast is None else fast.to_str()
    return [type(tokenizer).__name__, tokenizer.special_tokens_map, words, tokenizer.chat_template]
