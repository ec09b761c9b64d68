"""What skipping would do to an untrained model: its distance from full depth, bare and with closed-form stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core.adapter import Adapter
from ..core.attach import attach, detach, teacher_forced
from ..core.checkpoint_config import layer_count
from ..core.decays import flat_depth
from ..core.schedule import Schedule
from ..core.stack import text_config
from ..data.tasks import Example
from ..data.tokenization import encode_prompts
from ..errors import UsageError
from ..generation.generate import generate_ids
from ..training.closed_form import fit_stand_ins
from .loss import batches_of


@dataclass(frozen=True)
class Damage:
    """Distance from full depth on the model's own texts.

    Attributes:
        kl: mean KL divergence of the next token's distribution from full depth's, in nats per token.
        agreement: share of positions whose most likely token is full depth's.
    """

    kl: float
    agreement: float


@dataclass(frozen=True)
class Probed:
    """One way to skip layers at one speed.

    Attributes:
        speedup: full depth over depth.
        schedule: the layers, the same at every step.
        bare: without anything in the place of skipped layers.
        stand_ins: with stand-ins fitted in closed form to other texts.
    """

    speedup: float
    schedule: Schedule
    bare: Damage
    stand_ins: Damage


def own_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int,
    batch_size: int = 32,
    seed: int = 0,
) -> list[Example]:
    """Return what the model samples for each prompt at full depth and temperature 1; empty texts are left out."""
    ids = encode_prompts(tokenizer, prompts)
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
    }
    done = generate_ids(model, tokenizer, ids, None, batch_size, seed=seed, **options)
    pairs = zip(prompts, done.completions, strict=True)
    return [Example(prompt, (written.text,)) for prompt, written in pairs if written.text]


def candidates(num_layers: int, speedups: Sequence[float]) -> Iterator[Schedule]:
    """Yield flat schedules of each speed-up: ``top`` with 1 warm-up layer, a sixth, a third of the depth; ``even``."""
    for speedup in speedups:
        depth = flat_depth(speedup, num_layers)
        flat: dict[str, Any] = {"max_depth": depth, "min_depth": depth, "horizon": 1, "decay": "constant"}
        for warmup in sorted({1, max(num_layers // 6, 1), max(depth // 3, 1), max(depth // 2, 1)}):
            if warmup <= depth:
                yield Schedule(num_layers, order="top", warmup=warmup, **flat)
        yield Schedule(num_layers, order="even", warmup=0, **flat)


@torch.no_grad()
def probe(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Example],
    speedups: Sequence[float] = (1.1, 1.25, 1.5, 2.0, 3.0),
    *,
    rank: int = 64,
    batch_size: int = 8,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> list[Probed]:
    """Measure candidates at each speed-up, on half of ``texts``; stand-ins are fitted to the other half.

    Args:
        model: a causal LM, with or without gates, without an adapter.
        texts: prompts and what the model wrote, from :func:`own_texts`.
        speedups: of layers; each is rounded to whole layers.
        rank: of the stand-ins.
        on_progress: called with the candidates done and in all.

    Raises:
        UsageError: there are fewer than four texts.
    """
    if len(texts) < 4:
        raise UsageError(f"probing needs at least four texts, not {len(texts)}")
    config = model.config
    half = len(texts) // 2
    fitted_to, measured = (batches_of(part, tokenizer, model, batch_size) for part in (texts[:half], texts[half:]))
    attach(model)
    full = [_logits(model, batch, Schedule.full(layer_count(config))) for batch in measured]
    schedules = list(candidates(layer_count(config), speedups))
    results = []
    for done, schedule in enumerate(schedules):
        on_progress(done, len(schedules))
        bare = damage(model, measured, full, schedule)
        adapter = Adapter(text_config(config).hidden_size, rank, {schedule.target: schedule})
        attach(model, adapter=adapter)
        fit_stand_ins(model, adapter, fitted_to)
        results.append(Probed(schedule.target, schedule, bare, damage(model, measured, full, schedule)))
        attach(detach(model))
    on_progress(len(schedules), len(schedules))
    return results


def damage(
    model: PreTrainedModel, batches: Sequence[Mapping[str, Any]], full: Sequence[Tensor], schedule: Schedule
) -> Damage:
    """Return the distance from ``full``, the log probabilities (tokens, vocabulary) of each batch at full depth."""
    divergence, same, count = 0.0, 0, 0
    for batch, expected in zip(batches, full, strict=True):
        here = _logits(model, batch, schedule)
        divergence += float(kl_div(here, expected, log_target=True, reduction="sum"))
        same += int((here.argmax(-1) == expected.argmax(-1)).sum())
        count += len(here)
    return Damage(divergence / max(count, 1), same / max(count, 1))


def _logits(model: PreTrainedModel, batch: Mapping[str, Any], schedule: Schedule) -> Tensor:
    """Return the log probabilities (tokens, vocabulary) at the decode steps of a batch."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    wanted = batch["labels"][:, 2:] != -100  # the first response token follows the prompt, which runs all layers
    with torch.no_grad(), teacher_forced(model, schedule, batch["prompt_length"]):
        logits = model(**inputs, logits_to_keep=max(wanted.shape[1], 1), use_cache=False).logits
    return log_softmax(logits[:, -wanted.shape[1] :][wanted].float(), -1)
