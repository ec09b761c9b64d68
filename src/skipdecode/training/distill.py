"""Distillation of an adapter from texts that the model writes itself: the code behind ``skipdecode distill``."""

import gc
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from ..data.chat import Prompt
from ..data.collator import batches, batches_of
from ..data.examples import read_examples, subsample
from ..data.tasks import Example, get_task
from ..data.tokenize import encode_prompts
from ..errors import UsageError
from ..evaluation.divergence import Divergence, divergence
from ..generation.batches import max_positions
from ..generation.generate import generate_ids
from ..generation.job import GenerationJob
from ..hub.custom_generate import write_custom_generate
from ..loading.device import synchronize
from ..loading.load import Checkpoint
from ..model.adapter import TEXTS, Adapter, read_adapter, save_adapter
from ..model.attach import attach
from ..model.config import bind
from ..model.inspect import text_config
from ..model.lora import layer_of, linear_sizes
from ..model.teacher_forcing import PrefilledBatch
from ..schedule import Schedule
from . import prompts
from . import self_generated as texts
from .adapter_init import fit_bypasses
from .config import DistillConfig, claim_output
from .losses import DistillationModel
from .self_generated import Say, log
from .train import run, trainer_data
from .trainer import DistillationTrainer

#: Number of texts that bypasses are fitted to.
FITTED = 64
#: Decode steps that the forecast times.
STEPS = 8


def distill(config: DistillConfig, *, overwrite: bool = False, say: Say = log) -> list[Divergence]:
    """Learn an adapter from self-generated texts, and save it in ``config.output``; the model stays as it is.

    A killed run goes on with its texts and its newest checkpoint.

    Args:
        config: the run.
        overwrite: start anew; texts of the same model and options are kept.
        say: receives messages for the user.

    Returns:
        Divergence from the full model at each speed-up, on texts that were held out.

    Raises:
        SkipDecodeError: options, prompts, model or output folder do not fit.
        DivergedError: the loss is not finite; earlier checkpoints stay.
    """
    checkpoint = Checkpoint.resolve(config.model, config.adapter)
    base = replace(checkpoint, adapter=None)
    schedules = choose_schedules(config, checkpoint)
    weights = config.speedup_weights or [1.0] * len(schedules)
    fixed = [speedup for speedup, weight in zip(schedules, weights, strict=True) if not weight]
    args = config.arguments()
    where: dict[str, Any] = {"dtype": "bfloat16" if args.bf16 else "float32", "device": str(args.device)}
    args.bf16 = False  # the frozen model is in bfloat16 itself, and the adapter learns in float32
    folder = Path(config.output)
    last = claim_output(config, checkpoint.fingerprint, overwrite)
    if not (folder / TEXTS).exists():
        if args.world_size > 1:
            raise UsageError("one process writes the texts: run this once without accelerate, until training begins")
        say(forecast(config, base, args, where, {k: each for k, each in schedules.items() if k not in fixed}))
        gc.collect()  # gates and layers refer to each other: two models would be in memory
        texts.save_texts(folder / TEXTS, write_texts(config, base, args, where, say))
        for raw in folder.glob("self_generated.*.raw.jsonl"):
            raw.unlink()
        gc.collect()
    learned, held_out = texts.hold_out(read_examples(folder / TEXTS, get_task(), "train"), config.max_eval_samples)

    model = base.load(**where, attn_implementation=config.attn_implementation)
    tokenizer = base.tokenizer
    torch.manual_seed(args.seed)
    fitted = [] if last else prefill(model, tokenizer, learned[:FITTED])
    distilled = make_model(model, schedules, config.rank, checkpoint.adapter, fitted, config.lora_rank, fixed)
    measured = {"held-out texts": prefill(model, tokenizer, held_out)}
    if config.eval_prompts:
        measured[config.eval_prompts] = prefill(model, tokenizer, answers(model, tokenizer, config))
    if last is None:
        report(schedules, measured, "before training", say)
    trainer = DistillationTrainer(
        model=distilled,
        args=args,
        schedules=schedules,
        weights=config.speedup_weights,
        **trainer_data(model, tokenizer, learned, held_out, say, as_written=True),
    )
    run(trainer, last, say)
    found = report(schedules, measured, "now", say)
    if trainer.is_world_process_zero():
        save_adapter(folder, distilled.adapter, model, base.path)
        write_custom_generate(folder)
        say(f"saved to {folder}")
    return found


def choose_schedules(config: DistillConfig, checkpoint: Checkpoint) -> dict[float, Schedule]:
    """Schedules by target speed-up: those of the adapter to begin with, and new ones of constant depth."""
    known = {} if checkpoint.adapter is None else checkpoint.schedules
    speedups = config.speedups or tuple(known) or (1.5, 2.0)
    layers = checkpoint.num_layers
    style = config.style
    if known:
        fastest = known[max(known)]
        style = {"order": fastest.order, "warmup": fastest.warmup}
    elif style.get("order", "top") == "top":
        style = {"warmup": default_warmup(layers, max(speedups))} | style
    schedules = {}
    for speedup in speedups:
        schedules[speedup] = known.get(speedup) or Schedule.for_speedup(speedup, layers, **style)
        if schedules[speedup].is_full:
            raise UsageError(f"{speedup:g}x of {layers} layers is all of them: an adapter has nothing to learn")
    return schedules


def default_warmup(num_layers: int, fastest: float) -> int:
    """Bottom layers always kept: a sixth of all, at most half of those that the fastest speed runs."""
    return max(int(min(num_layers / 6, num_layers / fastest / 2)), 1)


def make_model(
    model: PreTrainedModel,
    schedules: Mapping[float, Schedule],
    rank: int,
    begin_with: Path | None,
    fitted: Sequence[PrefilledBatch],
    lora_rank: int = 0,
    fixed: Sequence[float] = (),
) -> DistillationModel:
    """Model to train, whose adapter has the weights of ``begin_with``; bypasses that it lacks are fitted to texts.

    Speeds that are ``fixed`` stay as they are, so the layers that they run get no LoRA that they had not.
    """
    start = None if begin_with is None else read_adapter(begin_with)
    bound = {speedup: bind(schedule, model.config) for speedup, schedule in schedules.items()}
    if start:
        rank, lora_rank = start.rank, start.lora_rank or lora_rank
    kept = [bound[speedup] for speedup in fixed]
    run = {layer for schedule in kept for layers in schedule.step_layer_sets for layer in layers}
    had = start.loras if start else {}
    linears = {name: each for name, each in linear_sizes(model).items() if name in had or layer_of(name) not in run}
    adapter = Adapter(text_config(model.config).hidden_size, rank, bound, linears, lora_rank)
    attach(model.requires_grad_(False), adapter=adapter)
    if start:
        weights, own = start.state_dict(), adapter.state_dict()  # maybe of other speed-ups, or without LoRA
        adapter.load_state_dict({name: weights.get(name, own[name]) for name in own})
    if fitted:
        fit_bypasses(adapter, fitted, known=[*start.bypasses] if start else [])
    return DistillationModel(model, adapter, kept)


def prefill(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[Example], batch_size: int = 8
) -> list[PrefilledBatch]:
    """Batches of self-generated texts on the model's device; texts longer than its positions are left out."""
    made = batches_of(texts, tokenizer, batch_size, max_positions(model.config), model.device, as_written=True)
    return [PrefilledBatch(model, batch) for batch in made]


def answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: DistillConfig) -> list[Example]:
    """The full model's greedy outputs for the prompts of ``config.eval_prompts``."""
    task = get_task(config.task)
    examples = read_examples(str(config.eval_prompts), task, "test", references=False)
    chosen = [example.prompt for example in subsample(examples, config.max_eval_samples)]
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": config.max_new_tokens or task.max_new_tokens}
    found = generate_ids(model, tokenizer, encode_prompts(tokenizer, chosen), None, 32, **options).completions
    return texts.keep_texts(chosen, found, log)


def report(
    schedules: Mapping[float, Schedule], measured: Mapping[str, Sequence[PrefilledBatch]], when: str, say: Say
) -> list[Divergence]:
    """Divergence of each speed-up from the full model on each set of texts, also told to the user; the first's."""
    first: list[Divergence] = []
    for name, prefilled in measured.items():
        found = divergence(prefilled, list(schedules.values())) if prefilled else []
        for speedup, each in zip(schedules, found, strict=False):
            interval = f" (95%: {each.interval[0]:.3f} to {each.interval[1]:.3f})" if each.interval else ""
            say(f"{speedup:g}x {when}, {name}: KL {each.kl:.3f}{interval}, same next token {each.top1:.1%}")
        first = first or found
    return first


def write_texts(
    config: DistillConfig, base: Checkpoint, args: TrainingArguments, where: Mapping[str, Any], say: Say
) -> list[Example]:
    """Let the full model write the texts; what it wrote before a kill is kept in the output folder."""
    settings: dict[str, Any] = {"speedup": 1, "batch_size": texts_at_once(args), "seed": args.seed, "load": where}

    def write(rows: Sequence[Prompt], options: dict[str, Any], name: str) -> Any:
        file = Path(config.output) / f"self_generated.{name}.raw.jsonl"
        job = GenerationJob(base, rows, file, options=options, engine=config.engine, **settings)
        with tqdm(desc=f"self-generated {name}", unit="text", file=sys.stderr) as bar:
            return texts.write_with_job(job, bar)

    task, count = get_task(config.task), config.num_texts
    found = prompts.find_prompts(base, config.prompts, task, count, write, say)
    return texts.self_generate(found, task, count, config.max_new_tokens, config.temperature, write, say)


def texts_at_once(args: TrainingArguments) -> int:
    """Texts that are written together: more than are learned together, since keys and values take less memory."""
    return max(args.train_batch_size, 32) * (1 if args.device.type == "cpu" else 8)


def forecast(
    config: DistillConfig,
    base: Checkpoint,
    args: TrainingArguments,
    where: Mapping[str, Any],
    schedules: Mapping[float, Schedule],
) -> str:
    """How long texts and training take, from a few timed steps of each, for short prompts and the longest texts."""
    tokenizer = base.tokenizer
    model = base.load(**where)
    distilled = make_model(model, schedules, config.rank, None, [], config.lora_rank)
    longest = config.max_new_tokens or get_task(config.task).max_new_tokens
    at_once = min(texts_at_once(args), config.num_texts)
    few = texts.SAMPLING | {"min_new_tokens": STEPS + 1, "max_new_tokens": STEPS + 1}
    rows = [{"prompt_ids": [tokenizer.pad_token_id] * 32, "response_ids": [tokenizer.pad_token_id] * longest}]
    size = args.train_batch_size
    (batch,) = batches(rows * size, tokenizer, size, max_positions(model.config), args.device)
    for _ in range(2):  # the first is not counted
        stats = generate_ids(model, tokenizer, encode_prompts(tokenizer, ["The"]) * at_once, None, at_once, **few).stats
    if config.attn_implementation is not None:
        model.set_attn_implementation(config.attn_implementation)
    for _ in range(2):
        start = time.perf_counter()
        teacher = distilled.teacher_output(batch)
        for schedule in schedules.values():
            distilled(teacher, schedule).backward()
        synchronize(args.device)
        seconds = time.perf_counter() - start
    tokens = longest
    if config.prompts is None:
        tokens += prompts.tokens_written(base)
    writing = stats.decode_seconds / stats.steps * tokens * math.ceil(config.num_texts / at_once)
    size *= args.gradient_accumulation_steps
    steps = args.max_steps if args.max_steps > 0 else math.ceil(config.num_texts * args.num_train_epochs / size)
    learning = steps * args.gradient_accumulation_steps * seconds
    whole, writes, learns = [tqdm.format_interval(part) for part in (writing + learning, writing, learning)]
    count = config.num_texts
    return f"this takes about {whole} without evaluation: {writes} for {count:,} texts, {learns} for {steps:,} steps"
