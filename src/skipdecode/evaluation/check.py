"""Proves on the user's own model what must hold (docs/method.md), against a reference that uses nothing of ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, PreTrainedModel

from ..core.attach import attach, detach, teacher_forced
from ..core.cache import SkipCache
from ..core.checkpoint_config import schedule_for
from ..core.guards import CacheProvider
from ..core.schedule import Schedule
from ..core.stack import decoder_layers, text_config, with_lenders_first
from ..errors import CacheError, SkipDecodeError, UnsupportedModel, UsageError
from ..weights.loading import load, read_config
from .reference import undone

#: Logits are equal if they differ by no more than this, relative to their scale,
TOLERANCE = 1e-5
#: or by no more than this many times what the stock model's own cached and uncached logits differ by.
TIMES_STOCK = 10
#: More than this is no rounding: the stock model itself looks ahead.
ROUNDING = 1e-3


@dataclass(frozen=True)
class Finding:
    """One claim, whether it held, and the number or the reason behind that."""

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

    def tokens(self, model: PreTrainedModel, cache: Any) -> list[list[int]]:
        """The new tokens of each row in the batch."""
        return self.generate(model, cache).sequences[:, -self.new_tokens :].tolist()

    def tokens_alone(self, model: PreTrainedModel, cache: Callable[[], Any]) -> list[list[int]]:
        """The new tokens of each row by itself, unpadded."""
        rows = range(len(self.ids))
        return [self.generate(model, cache(), row).sequences[0, -self.new_tokens :].tolist() for row in rows]

    def uncached(self, model: PreTrainedModel, text: Tensor) -> Tensor:
        """Logits (rows, new tokens, vocabulary) of one pass over prompts and new tokens, without a cache."""
        width = self.ids.shape[1]
        mask = torch.cat([self.mask, self.mask.new_ones(len(text), text.shape[1] - width)], 1)
        told = {}
        if "position_ids" in inspect.signature(model.forward).parameters:
            told["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        return model(text, attention_mask=mask, use_cache=False, **told).logits[:, width - 1 :]


def sample_batch(
    model: PreTrainedModel, lengths: tuple[int, ...] = (12, 5, 9), new_tokens: int = 12, seed: int = 0
) -> Batch:
    """Random token ids, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = min(text_config(model.config).vocab_size, 1000)  # tokens for images and sounds have the largest ids
    ids = torch.randint(0, vocabulary, (len(lengths), max(lengths)), generator=generator)
    mask = torch.stack([(torch.arange(max(lengths)) >= max(lengths) - n).long() for n in lengths])
    return Batch((ids * mask).to(model.device), mask.to(model.device), new_tokens)


def check_model(
    name: str,
    speedup: float | None = None,
    *,
    dtype: str = "float32",
    device: str | None = None,
    attention: str | None = None,
    revision: str | None = None,
) -> Iterator[Finding]:
    """Load a model and yield one finding per claim of :data:`CHECKS`.

    Args:
        name: directory, hub name, or ``demo``.
        speedup: whose schedule is checked, over 8 steps at most, so that few tokens pass through all of its depths.
        dtype, device, attention, revision: as :func:`skipdecode.load` takes them.

    Raises:
        UsageError: the schedule skips nothing.
        ModelError: the model cannot be loaded.
    """
    schedule = schedule_for(read_config(name, revision), speedup)
    if schedule.decay != "list":
        schedule = schedule.replace(horizon=min(schedule.horizon, 8))
    if schedule.is_full:
        raise UsageError("the schedule skips nothing, so there is nothing to check: give a speed-up of 2 or more")
    try:
        model, _ = load(name, dtype=dtype, device=device, attention=attention, revision=revision)
    except UnsupportedModel as error:
        yield Finding(ATTACHES, False, str(error))
    else:
        yield from run_checks(model, schedule)


def run_checks(model: PreTrainedModel, schedule: Schedule) -> Iterator[Finding]:
    """Yield one finding per claim. The model is left attached, if it can be.

    Skipping can amplify rounding. So a claim that does not hold in the model's own type is decided in float64, where
    rounding hides no fault and looks like none. A refusal of ours, or an error in the model, is a finding: the claim
    did not hold.
    """
    batch = sample_batch(model)
    provider = vars(model).get("generate")
    for claim, check in CHECKS.items():
        try:
            held, detail = check(model, schedule, batch)
            if not held and model.dtype != torch.float64:
                with in_float64(model):
                    held, exact = check(model, schedule, batch)
                detail += f"; in float64: {exact}"
        except SkipDecodeError as error:
            held, detail = False, str(error)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:  # the model's own code
            held, detail = False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        yield Finding(claim, held, detail)
        if claim == ATTACHES and not held:
            return
    if isinstance(provider, CacheProvider):  # the model's default schedule: the checks took it off with the gates
        attach(model, provider.schedule)


def attaches(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> tuple[bool, str]:
    """One stack of decoder layers, each fed by the one before it alone, and states in transformers' cache."""
    attach(model)
    return True, f"{type(model).__name__}, {schedule.num_layers} layers"


@torch.no_grad()
def inert(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> tuple[bool, str]:
    """Invariant 3: with the full schedule, or attached without one, outputs are the stock model's to the bit."""
    detach(model)
    stock = batch.generate(model, DynamicCache(config=model.config))
    attach(model)
    attached = batch.generate(model, DynamicCache(config=model.config))
    full = batch.generate(model, SkipCache(model, Schedule.full(schedule.num_layers)))
    same = all(torch.equal(a, b) for run in (attached, full) for a, b in zip(stock.logits, run.logits, strict=True))
    return same, f"{len(stock.logits)} steps bit-identical" if same else "logits differ"


@torch.no_grad()
def is_the_reference(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> tuple[bool, str]:
    """Cached decoding gives the logits of the stock model whose skipped layers were undone, in one uncached pass."""
    run = batch.generate(model, SkipCache(model, schedule))
    return _equals_undone(model, schedule, batch, run.sequences[:, :-1], torch.stack(run.logits, 1))


@torch.no_grad()
def is_teacher_forced(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> tuple[bool, str]:
    """Invariant 2: a training pass, where each layer computes its prefix of the positions, sees what decoding did."""
    text = batch.generate(model, SkipCache(model, schedule)).sequences[:, :-1]
    with teacher_forced(model, schedule, batch.ids.shape[1]):
        cut = batch.uncached(model, text)
    return _equals_undone(model, schedule, batch, text, cut)


def _equals_undone(
    model: PreTrainedModel, schedule: Schedule, batch: Batch, text: Tensor, logits: Tensor
) -> tuple[bool, str]:
    """Compare logits of ``text`` with the reference's, by the stock model's own rounding."""
    detach(model)
    stock = batch.generate(model, DynamicCache(config=model.config))
    rounding = _distance(torch.stack(stock.logits, 1), batch.uncached(model, stock.sequences[:, :-1]))
    with undone(model, schedule, batch.ids.shape[1], text):
        error = _distance(logits, batch.uncached(model, text))
    attach(model)
    if rounding > ROUNDING:
        return False, f"the stock model's own cached and uncached logits differ by {rounding:.1e}: it looks ahead"
    held = error <= max(TOLERANCE, TIMES_STOCK * rounding)
    return held, f"relative error {error:.1e} (the stock model's own: {rounding:.1e})"


@torch.no_grad()
def batch_is_alone(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> tuple[bool, str]:
    """Invariant 4: a row's greedy tokens do not depend on its neighbours or its padding."""
    together = batch.tokens(model, SkipCache(model, schedule))
    alone = batch.tokens_alone(model, lambda: SkipCache(model, schedule))
    equal = sum(a == b for a, b in zip(together, alone, strict=True))
    detail = f"{equal} of {len(alone)} rows equal"
    if equal < len(alone):
        stock = batch.tokens(model, DynamicCache(config=model.config))
        if stock != batch.tokens_alone(model, lambda: DynamicCache(config=model.config)):
            detail += "; the stock model's own rows depend on their left padding: generate one row at a time"
    return equal == len(alone), detail


@torch.no_grad()
def runs_repeat(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> tuple[bool, str]:
    """A second call, or a resumed job, writes the same: nothing is left in the model from the first."""
    first = batch.tokens(model, SkipCache(model, schedule))
    batch.generate(model, SkipCache(model, schedule), row=1)
    again = batch.tokens(model, SkipCache(model, schedule))
    equal = sum(a == b for a, b in zip(first, again, strict=True))
    return equal == len(first), f"{equal} of {len(first)} rows equal"


@torch.no_grad()
def used_caches_are_refused(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> tuple[bool, str]:
    """Invariant 6: going deeper again on a cache whose layers were retired is an error, never other text."""
    cache = SkipCache(model, schedule)
    batch.generate(model, cache)
    try:
        batch.generate(model, cache)
    except CacheError:
        return True, f"after depths {', '.join(map(str, dict.fromkeys(cache.step_depths)))}"
    return False, "a second generate on the same cache was accepted"


@torch.no_grad()
def work_falls(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> tuple[bool, str]:
    """Invariant 7: a step at reduced depth costs the full step's FLOPs less those of the layers it skips."""
    layers = decoder_layers(model)
    names = {id(module): name for name, module in model.named_modules()}
    owner = type(model).__name__
    depth = schedule.min_depth
    least = schedule.replace(max_depth=depth, decay="constant", horizon=1, depths=None)
    running = set(with_lenders_first(least, model.config).layers(depth))
    full, short = (_step_flops(model, batch, SkipCache(model, s)) for s in (Schedule.full(len(layers)), least))
    skipped = sum(
        sum(full[f"{owner}.{names[id(layer)]}"].values()) for i, layer in enumerate(layers) if i not in running
    )
    before, after = sum(full["Global"].values()), sum(short["Global"].values())
    held = before - after == skipped and skipped > 0
    return held, f"{before:,} to {after:,} at {len(running)} of {len(layers)} layers"


ATTACHES = "its layers can be skipped"
CHECKS: dict[str, Callable[[PreTrainedModel, Schedule, Batch], tuple[bool, str]]] = {
    ATTACHES: attaches,
    "inert at full depth": inert,
    "cached decoding = the stock layers, undone": is_the_reference,
    "a training pass = the stock layers, undone": is_teacher_forced,
    "a row in a batch = the row alone": batch_is_alone,
    "a second run writes the same": runs_repeat,
    "a used cache is refused": used_caches_are_refused,
    "FLOPs fall by the skipped layers' share": work_falls,
}


@contextmanager
def in_float64(model: PreTrainedModel) -> Iterator[None]:
    """Compute with the same weights in float64; the way back to the model's own type is exact."""
    types = {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    model.double()
    try:
        yield
    finally:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.data = tensor.data.to(types[name])


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max() / a.double().abs().max())


def _step_flops(model: PreTrainedModel, batch: Batch, cache: Any) -> Any:
    _feed(model, batch, cache)  # the prompt
    with FlopCounterMode(display=False) as counter:
        _feed(model, batch, cache)
    return counter.get_flop_counts()


def _feed(model: PreTrainedModel, batch: Batch, cache: Any) -> None:
    """The prompt into an empty cache, else one more position."""
    seen = cache.get_seq_length()
    ids = batch.ids if seen == 0 else batch.ids[:, -1:]
    mask = batch.mask if seen == 0 else torch.cat([batch.mask, batch.mask.new_ones(len(ids), 1)], 1)
    told = {}
    if "position_ids" in inspect.signature(model.forward).parameters:
        told["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, seen:]
    model(ids, attention_mask=mask, past_key_values=cache, use_cache=True, **told)
