"""What ``train`` does only where a model learns from texts of its own: to foresee, write, learn and measure."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.collator import batches
from ..data.tasks import Example, Task
from ..data.tokenize import encode_prompts
from ..evaluation.divergence import Divergence, divergence
from ..generation.engine import Engine
from ..generation.generate import generate_ids, max_positions
from ..generation.job import GenerationJob
from ..model.adapter import Adapter, locate_adapter, read_adapter
from ..model.attach import attach
from ..model.config import bind
from ..model.inspect import text_config
from ..model.teacher_forcing import PrefilledBatch
from ..schedule import Schedule
from .adapter_init import fit_stand_ins
from .checkpoints import RunFolder
from .config import TrainingPlan
from .learner import AdapterLearner
from .self_generated import SAMPLED, hold_out, own_texts
from .self_prompts import LONGEST, prompts_for

#: The texts, in the run's folder.
OWN_TEXTS, OWN_PROMPTS = "own_texts.jsonl", "own_prompts.jsonl"
#: Decode steps that a forecast times, after one that is not.
STEPS = 8
#: Texts that are written at a time on a CPU, at least; and how many times as many elsewhere, where there is room:
#: keys and values take less memory than the probabilities of all tokens.
WRITTEN, TIMES = 32, 8


def writing_job(plan: TrainingPlan, task: Task, engine: Engine, device: torch.device) -> GenerationJob:
    """Return the job that writes own texts, whose engine can say whether it will. A killed run loses one batch."""
    given = {"temperature": plan.temperature, "max_new_tokens": plan.max_new_tokens}
    options: dict[str, Any] = SAMPLED | {name: value for name, value in given.items() if value is not None}
    return GenerationJob(
        str(plan.model),
        task=task,
        batch_size=max(plan.rows, WRITTEN) * (1 if device.type == "cpu" else TIMES),
        seed=plan.seed,
        options=options,
        dtype="bfloat16" if plan.bf16 else "auto",
        engine=engine,
    )


def forecast(
    plan: TrainingPlan,
    job: GenerationJob,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> str:
    """Return how long own texts and training will take, by a few steps of each, for short prompts and long texts.

    Args:
        plan: the run, with adapters and own texts.
        job: as :func:`writing_job` makes it.
        model, tokenizer: loaded, and the model without an adapter; it is of no use afterwards.
        device: that the run will use.
    """
    count, longest = plan.own_texts or 0, job.options["max_new_tokens"]
    asks = plan.prompts is None and plan.data is None and tokenizer.chat_template is not None
    prompts, size = encode_prompts(tokenizer, ["The"]) * min(job.batch_size, count), job.batch_size
    few: Any = SAMPLED | {"min_new_tokens": STEPS + 1, "max_new_tokens": STEPS + 1}
    model.to(device)
    cost = [generate_ids(model, tokenizer, prompts, None, size, **few).stats for _ in range(2)][-1]
    writing = cost.decode_seconds / cost.steps * (longest + LONGEST * asks) * math.ceil(count / size)

    schedules = plan.first_schedules(model.config)
    learner = make_learner(plan, model, schedules, (), str)
    for rows, tokens in ((1, 8), (plan.rows, longest)):  # the first is not counted
        ids = {"prompt_ids": [tokenizer.pad_token_id] * 32, "response_ids": [tokenizer.pad_token_id] * tokens}
        (batch,) = batches([ids] * rows, tokenizer, rows, max_positions(model.config), device)
        batch_seconds = learner.seconds([*schedules.values()], batch)
    passes = plan.gradient_accumulation_steps
    steps = plan.max_steps or math.ceil(count * plan.num_train_epochs / (plan.rows * passes))
    learning = steps * passes * batch_seconds

    whole, *parts = map(tqdm.format_interval, (writing + learning, writing, learning))
    what = "questions and texts" if asks else "texts"
    what += " at the pace of transformers" if plan.engine != "transformers" else ""
    each = f"{parts[0]} for {count:,} {what}, {parts[1]} for {steps:,} steps"
    return f"this takes about {whole}, less if texts end early, more if prompts are long: {each}"


def write_own_texts(
    plan: TrainingPlan, job: GenerationJob, folder: RunFolder, say: Callable[[str], object]
) -> tuple[list[Example], list[Example]]:
    """Let the model write its own texts, in ``own_texts.jsonl``; return those to learn from, and those held out."""
    count = plan.own_texts or 0
    with tqdm(desc="own texts", unit="text", file=sys.stderr) as bar:

        def start(total: int, done: int) -> None:
            bar.reset(total)
            bar.update(done)

        told: dict[str, Any] = {"on_start": start, "on_batch": lambda cost: bar.update(cost.rows), "say": say}
        prompts = prompts_for(job, plan.prompts or plan.data, count, folder.folder / OWN_PROMPTS, **told)
        texts = own_texts(job, prompts, count, folder.folder / OWN_TEXTS, **told)
    return hold_out(texts, plan.max_eval_samples if plan.eval_steps else 0)


def make_learner(
    plan: TrainingPlan,
    model: PreTrainedModel,
    schedules: Mapping[float, Schedule],
    batches: Sequence[Mapping[str, Any]],
    say: Callable[[str], object],
) -> AdapterLearner:
    """Return what learns the adapter of a frozen model.

    Its weights are those of ``plan.adapter``; without one, its stand-ins are fitted in closed form to any ``batches``.
    """
    model.eval().requires_grad_(False)
    begun = read_adapter(locate_adapter(plan.adapter)) if plan.adapter else None
    rank = begun.rank if begun else plan.adapter_rank
    known = {speedup: bind(schedule, model.config) for speedup, schedule in schedules.items()}
    adapter = Adapter(text_config(model.config).hidden_size, rank, known)
    attach(model, adapter=adapter)
    if begun:
        weights = begun.state_dict()  # of more speed-ups, it may be
        adapter.load_state_dict({name: weights[name] for name in adapter.state_dict()})
        say(f"training begins with the adapter in {plan.adapter}")
    elif batches:
        fit_stand_ins(adapter, [PrefilledBatch(model, batch) for batch in batches])
    say(f"the adapter has {sum(weight.numel() for weight in adapter.parameters()):,} weights; the model stays as it is")
    return AdapterLearner(model, adapter)


def say_damage(
    model: PreTrainedModel,
    schedules: Mapping[float, Schedule],
    batches: Sequence[Mapping[str, Any]],
    when: str,
    say: Callable[[str], object],
) -> list[Divergence]:
    """Say, and return, how far each speed-up is from full depth on the texts that are held out, if there are any."""
    measured = divergence((PrefilledBatch(model, batch) for batch in batches), [*schedules.values()]) if batches else []
    for speedup, found in zip(schedules, measured, strict=False):
        within = f" (95%: {found.interval[0]:.3f} to {found.interval[1]:.3f})" if found.interval else ""
        say(
            f"{speedup:g}x {when}: {found.kl:.3f} nats per token from full depth{within}, "
            f"{found.top1:.1%} of its most likely tokens"
        )
    return measured
