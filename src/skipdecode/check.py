"""Proves on the user's own model what must hold (invariants 2, 3, 4 and 7 of docs/method.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, PreTrainedModel

from .cache import SkipCache
from .gate import attach, detach, teacher_forced
from .schedule import Schedule
from .stack import decoder_layers

#: Largest difference of logits, relative to their scale, that counts as equal in float32.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Finding:
    """One claim, whether it held, and the number behind that."""

    claim: str
    held: bool
    detail: str


@dataclass(frozen=True)
class Batch:
    """Left-padded prompts of uneven length: (rows, width) ids and mask."""

    ids: Tensor
    mask: Tensor
    new_tokens: int

    def generate(self, model: PreTrainedModel, cache: Any, row: int | None = None) -> Any:
        """Greedy tokens and raw logits; of one row alone and unpadded if ``row`` is given."""
        ids, mask = self.ids, self.mask
        if row is not None:
            ids = ids[row : row + 1, mask[row] == 1]
            mask = torch.ones_like(ids)
        return model.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=self.new_tokens,
            do_sample=False,
            num_beams=1,
            eos_token_id=None,
            pad_token_id=0,
            repetition_penalty=1.0,
            use_cache=True,
            output_logits=True,
            return_dict_in_generate=True,
        )


def sample_batch(
    model: PreTrainedModel, lengths: tuple[int, ...] = (12, 5, 9), new_tokens: int = 12, seed: int = 0
) -> Batch:
    """Random token ids, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(0, vocabulary, (len(lengths), max(lengths)), generator=generator)
    mask = torch.stack([(torch.arange(max(lengths)) >= max(lengths) - n).long() for n in lengths])
    return Batch((ids * mask).to(model.device), mask.to(model.device), new_tokens)


def run_checks(model: PreTrainedModel, schedule: Schedule) -> Iterator[Finding]:
    """Yield one finding per invariant. The model is left attached."""
    batch = sample_batch(model)
    for check in (inert, incremental_is_teacher_forced, batch_is_alone, work_falls):
        yield check(model, schedule, batch)


@torch.no_grad()
def inert(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> Finding:
    """Invariant 3: with the full schedule, or attached without one, outputs are the stock model's to the bit."""
    detach(model)
    stock = batch.generate(model, DynamicCache(config=model.config))
    attach(model)
    attached = batch.generate(model, DynamicCache(config=model.config))
    full = batch.generate(model, SkipCache(model, Schedule.full(schedule.num_layers)))
    same = all(torch.equal(a, b) for run in (attached, full) for a, b in zip(stock.logits, run.logits, strict=True))
    return Finding("inert at full depth", same, f"{len(stock.logits)} steps bit-identical" if same else "logits differ")


@torch.no_grad()
def incremental_is_teacher_forced(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> Finding:
    """Invariant 2: cached decoding gives the logits of one uncached pass on each layer's prefix of the columns."""
    run = batch.generate(model, SkipCache(model, schedule))
    width, text = batch.ids.shape[1], run.sequences[:, :-1]
    mask = torch.cat([batch.mask, batch.mask.new_ones(len(text), text.shape[1] - width)], 1)
    with teacher_forced(model, schedule, width):
        logits = model(
            text, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=False
        ).logits
    cached = torch.stack(run.logits, 1).float()
    error = float((cached - logits[:, width - 1 :].float()).abs().max() / cached.abs().max())
    return Finding("cached decoding = teacher-forced pass", error <= TOLERANCE, f"relative error {error:.1e}")


@torch.no_grad()
def batch_is_alone(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> Finding:
    """Invariant 4: a row's greedy tokens do not depend on its neighbours or its padding."""
    together = batch.generate(model, SkipCache(model, schedule)).sequences[:, -batch.new_tokens :]
    alone = [
        batch.generate(model, SkipCache(model, schedule), row).sequences[0, -batch.new_tokens :]
        for row in range(len(batch.ids))
    ]
    equal = sum(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
    return Finding("a row in a batch = the row alone", equal == len(alone), f"{equal} of {len(alone)} rows equal")


@torch.no_grad()
def work_falls(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> Finding:
    """Invariant 7: a step at reduced depth costs the full step's FLOPs less those of the layers it skips."""
    layers = decoder_layers(model)
    names = {id(module): name for name, module in model.named_modules()}
    owner = type(model).__name__
    running = set(schedule.layers(schedule.min_depth))
    least = Schedule.from_dict(
        schedule.to_dict() | {"max_depth": schedule.min_depth, "decay": "constant", "horizon": 1, "depths": None}
    )
    counts = {}
    for plan in (Schedule.full(schedule.num_layers), least):
        counts[plan] = _step_flops(lambda cache: _feed(model, batch, cache), SkipCache(model, plan))
    full, short = counts.values()
    skipped = sum(
        sum(full[f"{owner}.{names[id(layer)]}"].values()) for i, layer in enumerate(layers) if i not in running
    )
    before, after = sum(full["Global"].values()), sum(short["Global"].values())
    return Finding(
        "FLOPs fall by the skipped layers' share",
        before - after == skipped and skipped > 0,
        f"{before:,} to {after:,} at {len(running)} of {len(layers)} layers",
    )


def _step_flops(feed: Callable[[Any], None], cache: Any) -> Any:
    feed(cache)  # the prompt
    with FlopCounterMode(display=False) as counter:
        feed(cache)
    return counter.get_flop_counts()


def _feed(model: PreTrainedModel, batch: Batch, cache: Any) -> None:
    """The prompt into an empty cache, else one more column."""
    seen = cache.get_seq_length()
    ids = batch.ids if seen == 0 else batch.ids[:, -1:]
    mask = batch.mask if seen == 0 else torch.cat([batch.mask, batch.mask.new_ones(len(ids), 1)], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, seen:]
    model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
