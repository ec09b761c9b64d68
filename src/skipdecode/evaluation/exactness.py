"""Check the invariants of docs/method.md on a user's model, against a reference without gates or SkipCache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, PreTrainedModel

from ..errors import SkipDecodeError, UnsupportedModel, UsageError
from ..loading.load import adapter_of, load, read_config
from ..model.adapter import Adapter, trained_schedule
from ..model.attach import attach, detach, teacher_forced
from ..model.cache import SkipCache
from ..model.cache_name import CACHE
from ..model.config import bind
from ..model.gate import PatchedGenerate
from ..model.inspect import decoder_layers, gates_of, text_config
from ..schedule import Schedule
from .reference import discarding_skipped

#: Logits count as equal if their relative error is at most this,
TOLERANCE = 1e-5
#: or at most this many times the relative error between the stock model's cached and uncached logits.
TIMES_STOCK = 10
#: A larger error of the stock model is not rounding in float32 or above: the model attends to later positions.
ROUNDING = 1e-3


@dataclass(frozen=True)
class Finding:
    """The result of one check: the claim, whether it held, and the measured number or the reason."""

    claim: str
    held: bool
    detail: str


@dataclass(frozen=True)
class Batch:
    """Left-padded prompts of different lengths: ``ids`` and ``mask`` (rows, width), int64."""

    ids: Tensor
    mask: Tensor
    new_tokens: int
    adapter: Adapter | None = None  # the model's, which detach takes off

    def generate(self, model: PreTrainedModel, cache: Any, row: int | None = None) -> Any:
        """Generate greedily, for all rows or for one unpadded ``row``; return ``generate``'s output with raw logits."""
        ids, mask = self.ids, self.mask
        if row is not None:
            ids = ids[row : row + 1, mask[row] == 1]
            mask = torch.ones_like(ids)
        return model.generate(
            ids,
            attention_mask=mask,
            **{CACHE: cache},
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

    def tokens(self, model: PreTrainedModel, cache: Callable[[], Any], alone: bool = False) -> list[list[int]]:
        """Return each row's new tokens, from one batch or each unpadded row ``alone``; ``cache`` makes the caches."""
        runs = [self.generate(model, cache(), row) for row in (range(len(self.ids)) if alone else [None])]
        return torch.cat([run.sequences[:, -self.new_tokens :] for run in runs]).tolist()

    def uncached(self, model: PreTrainedModel, text: Tensor) -> Tensor:
        """Return the logits (rows, new tokens, vocabulary) that predict the new tokens of ``text``, in one pass."""
        width = self.ids.shape[1]
        mask = torch.cat([self.mask, self.mask.new_ones(len(text), text.shape[1] - width)], 1)
        return model(text, attention_mask=mask, use_cache=False, **_positions(model, mask)).logits[:, width - 1 :]


def sample_batch(model: PreTrainedModel) -> Batch:
    """Return prompts of random token ids, always the same, of different lengths."""
    lengths, new_tokens = (12, 5, 9), 12
    generator = torch.Generator().manual_seed(0)
    vocabulary = min(text_config(model.config).vocab_size, 1000)  # image and audio tokens have the largest ids
    ids = torch.randint(0, vocabulary, (len(lengths), max(lengths)), generator=generator)
    mask = torch.stack([(torch.arange(max(lengths)) >= max(lengths) - n).long() for n in lengths])
    return Batch((ids * mask).to(model.device), mask.to(model.device), new_tokens)


def check_model(
    name: str,
    speedup: float | None = None,
    *,
    dtype: str = "float32",
    device: str | None = None,
    revision: str | None = None,
) -> Iterator[Finding]:
    """Load a model and yield one finding per claim of :data:`CHECKS`.

    Args:
        name: directory, hub name, or ``demo``.
        speedup: selects the schedule; its horizon is cut to 8 steps, so that few tokens run all of its depths.
        dtype, device, revision: as :func:`skipdecode.load` takes them.

    Raises:
        UsageError: the schedule skips nothing.
        ModelError: the model cannot be loaded.
    """
    schedule = trained_schedule(read_config(name, revision), speedup, adapter_of(name))
    if schedule.decay != "list":
        schedule = schedule.replace(horizon=min(schedule.horizon, 8))
    if schedule.is_full:
        raise UsageError("the schedule skips nothing, so there is nothing to check: give a speed-up of 2 or more")
    try:
        model, _ = load(name, dtype=dtype, device=device, revision=revision)
    except UnsupportedModel as error:
        yield Finding(ATTACHES, False, str(error))
    else:
        if model.device.type == "mps":  # which has no float64
            model.to("cpu")
        yield from run_checks(model, schedule)


def run_checks(model: PreTrainedModel, schedule: Schedule) -> Iterator[Finding]:
    """Yield one finding per claim of :data:`CHECKS`, and leave gates attached to the model if it supports them.

    Skipping can amplify rounding errors, so a claim that fails in the model's dtype is checked again in float64. An
    error raised by SkipDecode or by the model counts as a claim that does not hold.
    """
    gates = gates_of(model)
    batch = replace(sample_batch(model), adapter=gates and gates.adapter)
    provider = vars(model).get("generate")
    for claim, check in CHECKS.items():
        try:
            held, detail = check(model, schedule, batch)
            if not held and model.dtype != torch.float64:
                with in_float64(model, batch.adapter):
                    held, exact = check(model, schedule, batch)
                detail += f"; in float64: {exact}"
        except SkipDecodeError as error:
            held, detail = False, str(error)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:  # from the model's code
            held, detail = False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        yield Finding(claim, held, detail)
        if claim == ATTACHES and not held:
            return
    if isinstance(provider, PatchedGenerate):  # restore the default schedule that the checks detached
        attach(model, provider.schedule, adapter=batch.adapter)


def attaches(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> tuple[bool, str]:
    """Attach gates; return True and the model's class and layers. Raises UnsupportedModel if none can be skipped."""
    attach(model, adapter=batch.adapter)
    return True, f"{type(model).__name__}, {schedule.num_layers} layers"


@torch.no_grad()
def is_inert(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> tuple[bool, str]:
    """Check invariant 3: with gates and no schedule, or a full one, logits are bit-identical to the stock model's."""
    detach(model)
    stock = batch.generate(model, DynamicCache(config=model.config))
    attach(model, adapter=batch.adapter)
    attached = batch.generate(model, DynamicCache(config=model.config))
    full = batch.generate(model, SkipCache(model, Schedule.full(schedule.num_layers)))
    same = all(torch.equal(a, b) for run in (attached, full) for a, b in zip(stock.logits, run.logits, strict=True))
    return same, f"{len(stock.logits)} steps bit-identical" if same else "logits differ"


@torch.no_grad()
def matches_uncached(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> tuple[bool, str]:
    """Compare cached decoding with an uncached pass whose skipped layers return the hidden states they are given."""
    run = batch.generate(model, SkipCache(model, schedule))
    return _compare_with_reference(model, schedule, batch, run.sequences[:, :-1], torch.stack(run.logits, 1))


@torch.no_grad()
def training_matches(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> tuple[bool, str]:
    """Check invariant 2: a training pass, with each layer run on a prefix of positions, gives decoding's logits."""
    text = batch.generate(model, SkipCache(model, schedule)).sequences[:, :-1]
    with teacher_forced(model, schedule, batch.ids.shape[1]):
        cut = batch.uncached(model, text)
    return _compare_with_reference(model, schedule, batch, text, cut)


def _compare_with_reference(
    model: PreTrainedModel, schedule: Schedule, batch: Batch, text: Tensor, logits: Tensor
) -> tuple[bool, str]:
    """Compare ``logits`` with an uncached pass over ``text`` whose skipped layers return what they are given."""
    detach(model)
    try:
        stock = batch.generate(model, DynamicCache(config=model.config))
        rounding = _distance(torch.stack(stock.logits, 1), batch.uncached(model, stock.sequences[:, :-1]))
        with discarding_skipped(model, schedule, batch.ids.shape[1], text, batch.adapter):
            error = _distance(logits, batch.uncached(model, text))
    finally:  # an error here must not fail the claims to come
        attach(model, adapter=batch.adapter)
    if rounding > ROUNDING:
        return False, f"the stock model's own cached and uncached logits differ by {rounding:.1e}, beyond rounding"
    held = error <= max(TOLERANCE, TIMES_STOCK * rounding)
    return held, f"off by {error:.1e} of the largest logit, rounding (the stock model itself: {rounding:.1e})"


@torch.no_grad()
def matches_alone(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> tuple[bool, str]:
    """Check invariant 4: the greedy tokens of a row do not depend on other rows or on padding."""
    together, alone = (batch.tokens(model, partial(SkipCache, model, schedule), one) for one in (False, True))
    equal = sum(a == b for a, b in zip(together, alone, strict=True))
    detail = f"{equal} of {len(alone)} rows equal"
    if equal < len(alone):
        stock = partial(DynamicCache, config=model.config)
        if batch.tokens(model, stock) != batch.tokens(model, stock, alone=True):
            detail += "; the stock model's own rows depend on their left padding: generate one row at a time"
    return equal == len(alone), detail


@torch.no_grad()
def runs_repeat(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> tuple[bool, str]:
    """Check that a second call generates the same tokens: the first call leaves no state in the model."""
    cache = partial(SkipCache, model, schedule)
    first = batch.tokens(model, cache)
    batch.generate(model, cache(), row=1)
    again = batch.tokens(model, cache)
    equal = sum(a == b for a, b in zip(first, again, strict=True))
    return equal == len(first), f"{equal} of {len(first)} rows equal"


@torch.no_grad()
def work_falls(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> tuple[bool, str]:
    """Check invariant 7: a reduced step takes a full one's FLOPs minus the skipped layers', plus an adapter's maps'."""
    layers = decoder_layers(model)
    names = {id(module): name for name, module in model.named_modules()}
    owner = type(model).__name__
    depth = schedule.min_depth
    least = schedule.replace(max_depth=depth, decay="constant", horizon=1, depths=None)
    running = set(bind(least, model.config).layers(depth))
    full, short = (_step_flops(model, batch, SkipCache(model, s)) for s in (Schedule.full(len(layers)), least))
    skipped = sum(
        sum(full[f"{owner}.{names[id(layer)]}"].values()) for i, layer in enumerate(layers) if i not in running
    )
    maps = batch.adapter.flops(sorted(running)) * len(batch.ids) if batch.adapter else 0
    before, after = sum(full["Global"].values()), sum(short["Global"].values())
    held = before - after == skipped - maps and skipped > maps
    return held, f"{before:,} to {after:,} at {len(running)} of {len(layers)} layers"


ATTACHES = "its layers can be skipped"
#: Each returns whether its claim holds, and what was measured, as text.
CHECKS: dict[str, Callable[[PreTrainedModel, Schedule, Batch], tuple[bool, str]]] = {
    ATTACHES: attaches,
    "inert at full depth": is_inert,
    "cached decoding = these layers without a cache": matches_uncached,
    "a training pass = these layers without gates": training_matches,
    "a row in a batch = the row alone": matches_alone,
    "a second run writes the same": runs_repeat,
    "FLOPs fall by the skipped layers' share": work_falls,
}


@contextmanager
def in_float64(model: PreTrainedModel, adapter: Adapter | None = None) -> Iterator[None]:
    """Convert weights, the adapter's too, to float64 in the context; restore their dtypes and exact values after it."""
    tensors = [*model.parameters(), *model.buffers(), *(adapter.parameters() if adapter else ())]
    types = [tensor.dtype for tensor in tensors]
    try:
        for module in (model, adapter):
            if module is not None:
                module.double()
        yield
    finally:
        for tensor, dtype in zip(tensors, types, strict=True):
            tensor.data = tensor.data.to(dtype)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max() / a.double().abs().max())


def _positions(model: PreTrainedModel, mask: Tensor) -> dict[str, Tensor]:
    """Return {``position_ids``: those of left-padded rows}; {} if the model does not take them."""
    takes = "position_ids" in inspect.signature(model.forward).parameters
    return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if takes else {}


def _step_flops(model: PreTrainedModel, batch: Batch, cache: Any) -> Any:
    """Run the prompt and one decode step, and return the step's FLOPs by module."""
    width = batch.ids.shape[1]
    ids = torch.cat([batch.ids, batch.ids[:, -1:]], 1)
    mask = torch.cat([batch.mask, torch.ones_like(batch.mask[:, :1])], 1)
    for part in (slice(0, width), slice(width, width + 1)):
        told = {name: positions[:, part] for name, positions in _positions(model, mask).items()}
        with FlopCounterMode(display=False) as counter:
            model(ids[:, part], attention_mask=mask[:, : part.stop], **{CACHE: cache}, use_cache=True, **told)
    return counter.get_flop_counts()
