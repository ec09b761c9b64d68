"""Run a training plan from loading the data to saving the model: the code behind ``skipdecode train``."""

from __future__ import annotations

import gc
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

from ..data.collator import Collator, batches_of, encoded
from ..data.tasks import Example, Task, task_from
from ..errors import DataError, UsageError
from ..evaluation.methods import get_method
from ..generation.engine import Transformers
from ..generation.engines import get_engine
from ..generation.generate import max_positions
from ..hub.custom_generate import write_custom_generate
from ..latency.fitting import batch_lengths
from ..latency.resolve import method_schedule, new_schedule
from ..loading import load as loading
from ..model.adapter import locate_adapter, save_adapter
from ..model.attach import attach
from ..model.config import schedules_of, set_entry, to_config_entry
from ..provenance import fingerprint, identity
from ..schedule import Schedule
from .callbacks import StopBySignal
from .checkpoints import STAGING, RunFolder, run_folder, writing
from .config import TrainingPlan
from .distill import OWN_TEXTS, forecast, make_learner, say_damage, write_own_texts, writing_job
from .learner import TextCollator
from .losses import Distillation, ExitLoss, Objective
from .self_generated import read_prompts
from .trainer import AdapterTrainer, SkipTrainer, checkpointing_option, refuse_nonfinite, training_args

logger = logging.getLogger(__name__)

#: Number of training responses that schedules are fitted to, and of texts that stand-ins are.
MEASURED, FITTED = 5000, 64


def train(plan: TrainingPlan, *, resume: bool = True, say: Callable[[str], object] = logger.warning) -> None:
    """Train a model as ``plan`` says, and save it and ``training.json`` (the plan) in ``plan.output``.

    A stopped run resumes from its newest undamaged checkpoint, and ends with the weights of an uninterrupted run.

    Args:
        plan: the run.
        resume: False starts anew, and deletes the run's checkpoints in ``plan.output``.
        say: receives messages for the user.

    Raises:
        UsageError, ScheduleError: the plan does not fit the model.
        DataError: the data is missing, does not fit the task, or is longer than the model's positions.
        ModelError: the model or teacher is missing, is damaged, or cannot skip layers.
        UsageError: another process trains in the folder, or its checkpoints belong to another run.
        FileError: the folder holds what is to be trained, or a model or checkpoints that no training run wrote.
        DivergedError: the loss or a weight is not finite; the last checkpoint and model stay.
    """
    if os.environ.get("RANK", "0") != "0":
        say = str  # only the first process prints
    task = task_from(vars(plan))
    training, validation = ([], []) if plan.own_texts else _read(plan, task)
    with run_folder(plan.output, plan.model, plan.adapter, plan.teacher) as folder:
        # Check before loading weights, so that a wrong option fails at once.
        path = Path(plan.from_config) if plan.from_config else None
        config = loading.new_config(path) if path else loading.read_config(str(plan.model))
        plan.check(config)
        args = make_args(plan)
        if plan.own_texts:
            done = (folder.folder / OWN_TEXTS).with_suffix(".json").exists()  # then vLLM need not be installed here
            if not done and args.world_size > 1:
                raise UsageError(
                    "one process writes own texts: run this once without accelerate, until training begins"
                )
            if not done and (source := plan.prompts or plan.data):  # a wrong one is told before anything is loaded
                if plan.prompts and not Path(source).exists():
                    raise DataError(f"there is no file {source}, of which --prompts takes the prompts")
                read_prompts(source, task)
            job = writing_job(plan, task, Transformers() if done else get_engine(plan.engine), args.device)
            job.engine.check(job, config, loading.read_generation_config(job.model))
            if plan.learns_adapter and not done:
                begun = ", with what is written already" if any(folder.folder.glob("own_*.jsonl*")) else ""
                say(forecast(plan, job, *_load(plan, config, ()), args.device) + begun)
                gc.collect()  # gates and layers hold each other: this model is not to stay beside the next
            training, validation = write_own_texts(plan, job, folder, say)
        model, tokenizer = _load(plan, config, training)
        limit = max_positions(model.config) or sys.maxsize
        written = plan.own_texts is not None
        rows, held_out = (
            Dataset.from_list(encoded(part, tokenizer, limit, as_written=written)) for part in (training, validation)
        )
        if not len(rows):
            raise DataError(f"no training example fits the model's {limit} positions")
        for what, count in (("training", len(training) - len(rows)), ("validation", len(validation) - len(held_out))):
            if count:
                say(f"{count:,} {what} rows are left out: they have over {limit:,} tokens, the model's positions")
        if not len(held_out):
            say("no validation data, or --eval-steps 0: nothing will be evaluated")
            args.eval_strategy = "no"
        schedules = _schedules(plan, model.config, rows, plan.max_new_tokens or task.max_new_tokens, say)
        record = _record(plan, config, tokenizer, training, schedules, args)
        torch.manual_seed(plan.seed)
        model = get_method(plan.method).prepare(model, plan.budgets[0], **plan.layers)
        objective: Objective | None = ExitLoss(model) if get_method(plan.method).trains_exits else None
        if plan.distill_weight:
            teacher = loading.load(plan.teacher, dtype="float32", device="cpu")[0] if plan.teacher else None
            objective = Distillation(plan.distill_weight, teacher)
        checkpoint = folder.newest(record, say) if resume else None
        if checkpoint is not None:
            say(f"going on from {checkpoint}")
        set_entry(model.config, to_config_entry(schedules, plan.method))
        args._n_gpu = 1  # no DataParallel: its copies' gates would point to the first GPU
        trained: Any = attach(model.train())  # before peft wraps it
        collator = (TextCollator if plan.learns_adapter else Collator)(tokenizer.pad_token_id, max_length=limit)
        if plan.learns_adapter:
            first, measured = (
                batches_of(part, tokenizer, 8, limit, args.device, as_written=written)
                for part in (training[:FITTED], validation)
            )
            trained = make_learner(plan, model.to(args.device), schedules, [] if checkpoint else first, say)
            before = [] if checkpoint else say_damage(model, schedules, measured, "before training", say)
        if plan.lora_rank:
            from peft import LoraConfig, get_peft_model

            lora = LoraConfig(r=plan.lora_rank, lora_alpha=2 * plan.lora_rank, target_modules="all-linear")
            trained = get_peft_model(model, lora)
        kind: Any = AdapterTrainer if plan.learns_adapter else SkipTrainer
        trainer = kind(
            model=trained,
            args=args,
            data_collator=collator,
            processing_class=tokenizer,
            schedules=schedules,
            train_dataset=rows,
            eval_dataset=held_out if len(held_out) else None,
            objective=objective,
            weights=plan.weights,
            folder=folder,
            record=record,
        )
        _run(trainer, plan, folder, checkpoint, say)
        if plan.learns_adapter:
            now = say_damage(model, schedules, measured, "now", say)
            if any(then.kl <= here.kl for then, here in zip(before, now, strict=False)):
                say("a speed-up is no nearer than before training: so few steps do not pay, give it more")
        say(f"saved to {plan.output}")


def _run(
    trainer: SkipTrainer, plan: TrainingPlan, folder: RunFolder, checkpoint: Path | None, say: Callable[[str], object]
) -> None:
    """Train, from ``checkpoint`` if there is one, and replace the model in ``folder`` by the trained one."""
    first = trainer.is_world_process_zero()
    trainer.accelerator.wait_for_everyone()  # start() deletes checkpoints: all processes have chosen theirs by now
    if first:
        folder.start(plan.to_dict(), checkpoint)
    stop = StopBySignal(trainer.accelerator, say)
    trainer.add_callback(stop)
    try:
        with stop:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        trainer.bar.close()
    if cut := trainer.data_collator.cut:
        where = "beside a longer prompt they passed the model's positions"
        say(f"responses lost their ends {cut} times, in all epochs: {where}")
    model: Any = trainer.model
    staging = folder.folder / STAGING
    if first:
        folder.new_staging()
    if plan.lora_rank:
        if first:
            with writing(folder.folder):
                model.save_pretrained(staging / "adapter")
        model = model.merge_and_unload()
    refuse_nonfinite(model)
    model.config.use_cache = True  # the Trainer turns it off
    if first:
        with writing(folder.folder):
            if plan.learns_adapter:
                name = str(plan.model)
                base = name if name == "demo" else loading.resolve(name)  # an absolute path, or a name on the hub
                save_adapter(staging, model.adapter, model.model, base)
            else:
                model.save_pretrained(staging)
                trainer.processing_class.save_pretrained(staging)
            write_custom_generate(staging)
        folder.publish()


#: Options with the same name in TrainingArguments.
SAME = (
    "num_train_epochs gradient_accumulation_steps lr_scheduler_type warmup_steps weight_decay adam_beta2 "
    "save_steps eval_steps seed"
).split()

#: Options that a resumed run must share. Others may differ, or show in what :func:`_record` adds.
DECISIVE = (
    "method weights distill_weight gradient_accumulation_steps lr_scheduler_type warmup_steps "
    "weight_decay adam_beta2 lora_rank adapter_rank bf16 attn_implementation seed"
).split()


def make_args(plan: TrainingPlan) -> TrainingArguments:
    """Return the plan's options as transformers' TrainingArguments."""
    return training_args(
        output_dir=plan.output,
        max_steps=plan.max_steps or -1,
        learning_rate=plan.rate,
        per_device_train_batch_size=plan.rows,
        per_device_eval_batch_size=plan.rows,
        use_cpu=not torch.accelerator.is_available(),
        bf16=plan.bf16 and not plan.learns_adapter,  # the frozen model is in bfloat16 itself
        logging_steps=10,
        report_to=list(plan.report_to),
        eval_strategy="steps" if plan.eval_steps else "no",
        **{name: getattr(plan, name) for name in SAME},
        **checkpointing_option(plan.gradient_checkpointing),
    )


def _load(
    plan: TrainingPlan, config: Any, training: Sequence[Example]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the loaded or new model, and its tokenizer. Raises UsageError if the teacher has another vocabulary."""
    attention, made = plan.attn_implementation, None
    if plan.from_config:
        texts = [f"{example.prompt} {example.references[0]}" for example in training]
        made = loading.from_config(Path(plan.from_config), texts, plan.tokenizer, attention, plan.seed)
        config = made[0].config
    if plan.teacher:
        both = (config, loading.read_config(plan.teacher))
        if len({each.get_text_config(decoder=True).vocab_size for each in both}) > 1:
            raise UsageError(f"{plan.teacher} has another vocabulary than the model: its logits cannot be learned from")
    # Weights that learn stay float32, also with --bf16; the Trainer moves them to the device.
    dtype = "bfloat16" if plan.bf16 and plan.learns_adapter else "float32"
    return made or loading.load(str(plan.model), dtype=dtype, device="cpu", attn_implementation=attention)


def _schedules(
    plan: TrainingPlan, config: Any, rows: Dataset, max_new_tokens: int, say: Callable[[str], object]
) -> dict[float, Schedule]:
    """Return, by target speed-up, the schedules to train for: the plan's, the config's, or fitted to ``rows``."""

    @cache
    def measure() -> list[int]:
        responses = rows[:MEASURED]["response_ids"]
        return batch_lengths([min(len(ids), max_new_tokens) for ids in responses], plan.rows)

    style = plan.style_for(config)

    def fitted(speedup: float) -> Schedule:
        if plan.adapter or plan.schedule is not None:
            return plan.first_schedules(config)[speedup]
        if plan.lengths is None and plan.horizon is None:
            return method_schedule(get_method(plan.method), config, speedup, measure, **style)
        basis, options = plan.lengths or (), {"horizon": plan.horizon, **style}
        return new_schedule(config, speedup, basis, method=get_method(plan.method), **options)

    schedules = {speedup: fitted(speedup) for speedup in plan.budgets}
    if plan.learns_adapter:  # whose prompts run all layers, whatever the model was trained for
        schedules = {k: schedule.replace(prompt_layers=None, prompt_decay=0) for k, schedule in schedules.items()}
    kept = [k for k, schedule in schedules_of(config, plan.method).items() if schedules.get(k) == schedule]
    if kept:
        which = ", ".join(f"{k:g}x" for k in kept)
        say(f"{plan.model} brings schedules for {which}: they stay as they are (--lengths fits new ones)")
    return schedules


def _read(plan: TrainingPlan, task: Task) -> tuple[list[Example], list[Example]]:
    """Return the rows to train on, and those to evaluate with. Raises DataError if there are none of the former."""
    data = Path(plan.data or ".")
    training = task.read(data, "train")
    if not training:
        raise DataError(f"{data} holds no training rows")
    return training, task.read(data, "validation")[: plan.max_eval_samples] if plan.eval_steps else []


def _record(
    plan: TrainingPlan,
    config: Any,
    tokenizer: PreTrainedTokenizerBase,
    training: Sequence[Example],
    schedules: Mapping[float, Schedule],
    args: TrainingArguments,
) -> dict[str, Any]:
    """Return the run's identity: a checkpoint is resumed only by a run in which all of it is equal."""
    teacher = plan.teacher and fingerprint(loading.identity_of(plan.teacher))
    adapter = plan.adapter and fingerprint(identity(str(locate_adapter(plan.adapter))))
    fast = getattr(tokenizer, "backend_tokenizer", None)
    words = tokenizer.get_vocab() if fast is None else fast.to_str()
    if plan.from_config:
        start: Any = config.to_dict()
    else:
        start = loading.identity_of(str(plan.model))
    return {
        "model": fingerprint(start),
        "tokenizer": fingerprint(
            type(tokenizer).__name__, tokenizer.special_tokens_map, words, tokenizer.chat_template
        ),
        "data": fingerprint(*map(asdict, training)),
        "budgets": [[k, schedule.to_dict()] for k, schedule in schedules.items()],  # the draw depends on the order
        "teacher": teacher,
        "adapter": adapter,
        "number of processes": args.world_size,
        "optimizer": "Muon" if plan.learns_adapter else "AdamW",
        "learning_rate": plan.rate,
        "batch_size": plan.rows,
        **({"layers": plan.layers} if get_method(plan.method).takes_layers else {}),
    } | {name: getattr(plan, name) for name in DECISIVE}
