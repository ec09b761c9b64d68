"""One training run from beginning to end: what ``skipdecode train`` does, for Python too."""

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

#: Training responses that schedules are fitted to.
MEASURED = 5000
#: Steps from one report of the loss to the next.
LOGGED = 10


def train(plan: TrainingPlan, *, resume: bool = True, say: Callable[[str], object] = logger.warning) -> None:
    """Train as ``plan`` says. The checkpoint and ``training.json``, which holds the plan, lie in its ``output`` then.

    A run that was stopped goes on from its newest whole checkpoint, and ends with the weights it would have had.

    Args:
        plan: the run.
        resume: False starts anew, and removes the checkpoints of the run in ``plan.output``.
        say: gets a line for whatever the user should know: where it goes on from, what is left out, where it is saved.

    Raises:
        UsageError, ScheduleError: the plan does not fit the model.
        TaskError: data that is missing, not in the task's form, or longer than the model's positions.
        ModelError: a model or a teacher that is not there, is damaged, or cannot skip layers.
        JobError: another process trains in the folder, or what is to be resumed there is another run.
        FileError: the folder holds what no training run wrote.
        DivergedError: loss or weights are no longer finite; the last checkpoint and model stay.
    """
    if os.environ.get("RANK", "0") != "0":
        say = _silent  # of several processes the first one speaks
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
        # What is wrong shows before any weights are loaded.
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
    """Train a model that is in memory, from ``checkpoint`` on, and save it to ``folder``.

    Args:
        options: of :class:`SkipTrainer`.

    Returns:
        The trained model. Gates stay on; its config carries the schedules.
    """
    entry = to_config_entry(options["schedules"], plan.method)
    if entry is not None:
        setattr(model.config, CONFIG_KEY, entry)
    elif hasattr(model.config, CONFIG_KEY):
        delattr(model.config, CONFIG_KEY)
    options["args"]._n_gpu = 1  # torch's DataParallel would copy gates that point to the first GPU: accelerate launch
    trained: Any = attach(model)  # before peft wraps it: the guard belongs on the model that is returned
    if plan.lora_rank:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=plan.lora_rank, lora_alpha=2 * plan.lora_rank, target_modules="all-linear")
        trained = get_peft_model(model, config)
    collator = Collator(tokenizer.pad_token_id, max_length=max_positions(model.config))
    trainer = SkipTrainer(model=trained, data_collator=collator, processing_class=tokenizer, folder=folder, **options)
    first = trainer.is_world_process_zero()
    trainer.accelerator.wait_for_everyone()  # all have looked for the checkpoint
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


#: Options that TrainingArguments has too.
SAME = (
    "num_train_epochs gradient_accumulation_steps learning_rate lr_scheduler_type warmup_steps weight_decay adam_beta2 "
    "bf16 save_steps eval_steps seed"
).split()


def make_args(plan: TrainingPlan) -> TrainingArguments:
    """The plan as transformers has it."""
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
    """The model to begin with, after a look at its teacher."""
    attention = plan.attn_implementation
    if plan.from_config:
        texts = [f"{example.prompt} {example.references[0]}" for example in training]
        model, tokenizer = loading.from_config(Path(plan.from_config), texts, plan.tokenizer, attention, plan.seed)
        config = model.config
    if plan.teacher:
        plan.check_teacher(config, loading.read_config(plan.teacher))
    if not plan.from_config:
        # In float32 whatever the checkpoint holds (--bf16 casts products, not weights); the Trainer moves it.
        model, tokenizer = loading.load(str(plan.model), dtype="float32", device="cpu", attention=attention)
    return model, tokenizer


def _held_out(
    validation: Sequence[Example], tokenizer: PreTrainedTokenizerBase, limit: int, max_new_tokens: int
) -> tuple[Dataset, list[Example]]:
    """Validation rows of at most ``limit`` tokens for the loss, and examples that leave room for a text to score."""
    prompts = [len(row["prompt_ids"]) for row in encode(validation, tokenizer)]
    scored = [e for e, tokens in zip(validation, prompts, strict=True) if tokens + max_new_tokens <= limit]
    return encode(validation, tokenizer, limit), scored


def _schedules(
    plan: TrainingPlan, config: Any, rows: Dataset, max_new_tokens: int, say: Callable[[str], object]
) -> dict[float, Schedule]:
    """Target speed-up -> schedule to train for."""

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
    """What is minimised, with the teacher loaded; None for cross-entropy."""
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
    """What makes the run what it is. A checkpoint of a run in which any of it differs is not resumed."""
    teacher = plan.teacher and fingerprint(identity(loading.resolve(plan.teacher)))
    if plan.from_config:
        start: Any = _read_config(plan).to_dict()
    else:  # a hub name alone does not say which version it is
        start = [identity(loading.resolve(str(plan.model))), getattr(model.config, "_commit_hash", None)]
    return {
        "model": fingerprint(start),
        "tokenizer": fingerprint(*vocabulary(tokenizer)),
        "data": fingerprint(*map(asdict, training)),
        "method": plan.method,
        "budgets": [[k, schedule.to_dict()] for k, schedule in schedules.items()],  # in the order they are drawn by
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
    """What decides which ids a text or a chat has."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    words = tokenizer.get_vocab() if fast is None else fast.to_str()
    return [type(tokenizer).__name__, tokenizer.special_tokens_map, words, tokenizer.chat_template]
