"""Checks that skipping is exact on a user's model, against a reference without gates and without SkipCache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, PreTrainedModel

from ..errors import ModelError, SkipDecodeError, UsageError
from ..loading.load import Checkpoint
from ..model.adapter import Adapter
from ..model.attach import attach, detach, teacher_forced
from ..model.cache import SkipCache
from ..model.cache_name import CACHE
from ..model.config import bind
from ..model.inspect import decoder_layers, gates_of, text_config
from ..schedule import Schedule, choose_schedule

#: Logits count as equal up to this relative error, or up to TIMES_STOCK times the stock model's own error between
#: cached and uncached logits. A stock error above ROUNDING is no rounding: the model attends to later positions.
TOLERANCE, TIMES_STOCK, ROUNDING = 1e-5, 10, 1e-3
#: Decode steps over which the depth falls, so that a short text runs all depths; and new tokens of the texts.
HORIZON, NEW_TOKENS = 8, 12


@dataclass(frozen=True)
class Finding:
    """The result of one check: the claim, whether it held, and the measured number or the reason."""

    claim: str
    held: bool
    detail: str


@dataclass(frozen=True)
class Batch:
    """Left-padded prompts of different lengths: ``ids`` and ``mask`` (batch, positions), and the model's adapter."""

    ids: Tensor
    mask: Tensor
    adapter: Adapter | None = None

    @property
    def width(self) -> int:
        """Positions of the padded prompts."""
        return self.ids.shape[1]

    def generate(
        self, model: PreTrainedModel, cache: Any, sequence: int | None = None, new_tokens: int = NEW_TOKENS
    ) -> tuple[Tensor, Tensor]:
        """Tokens (batch, positions) and logits (batch, new tokens, vocabulary) of greedy generation.

        Of all sequences, or of one without its padding. ModelError: logits are NaN.
        """
        ids, mask = self.ids, self.mask
        if sequence is not None:
            ids = ids[sequence : sequence + 1, mask[sequence] == 1]
            mask = torch.ones_like(ids)
        output = model.generate(
            ids,
            attention_mask=mask,
            **{CACHE: cache},
            max_new_tokens=new_tokens,
            do_sample=False,
            num_beams=1,
            eos_token_id=None,
            pad_token_id=0,
            repetition_penalty=1.0,
            use_cache=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return output.sequences, _numbers(torch.stack(output.logits, 1))

    def tokens(self, model: PreTrainedModel, cache: Callable[[], Any], alone: bool = False) -> list[list[int]]:
        """New tokens of each sequence, from one batch or each ``alone``; ``cache`` makes the caches."""
        sequences = range(len(self.ids)) if alone else [None]
        texts = [self.generate(model, cache(), sequence)[0][:, -NEW_TOKENS:] for sequence in sequences]
        return torch.cat(texts).tolist()

    def uncached(self, model: PreTrainedModel, text: Tensor) -> Tensor:
        """Logits (batch, new tokens, vocabulary) that predict the new tokens of ``text``, from one pass."""
        mask = torch.cat([self.mask, self.mask.new_ones(len(text), text.shape[1] - self.width)], 1)
        options: dict[str, Any] = {"attention_mask": mask, "use_cache": False}
        if "position_ids" in inspect.signature(model.forward).parameters:
            options["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        return _numbers(model(text, **options).logits[:, self.width - 1 :])


def check_model(
    checkpoint: Checkpoint, speedup: float | None = None, dtype: str = "float32", device: str | None = None
) -> Iterator[Finding]:
    """Load a model and yield the findings of :func:`run_checks`.

    Args:
        checkpoint: the model, perhaps with an adapter.
        speedup: which schedule to check; None: the slowest trained one, else a falling one for 2x.
        dtype, device: as :func:`skipdecode.load` takes them.

    Raises:
        UsageError: the schedule skips nothing.
        UnsupportedModel: no layer of the model can be skipped exactly.
    """
    schedule = Schedule.for_speedup(speedup or 2, checkpoint.num_layers, HORIZON, decay="linear")
    if checkpoint.schedules:
        schedule = choose_schedule(checkpoint.schedules, checkpoint.num_layers, speedup)
    if schedule.depths is None:
        schedule = schedule.replace(horizon=min(schedule.horizon, HORIZON))
    if schedule.is_full:
        raise UsageError("the schedule skips nothing: give a --speedup of 2 or more")
    model = checkpoint.load(dtype, device)
    yield from run_checks(model.to("cpu") if model.device.type == "mps" else model, schedule)  # mps has no float64


def run_checks(model: PreTrainedModel, schedule: Schedule) -> Iterator[Finding]:
    """Yield a finding for each claim of :data:`CHECKS` about a model with gates attached.

    Skipping can amplify rounding errors, so a claim that fails in the model's dtype is checked again in float64. An
    error that SkipDecode or the model raises is a claim that does not hold.
    """
    batch = replace(sample_batch(model), adapter=gates_of(model).adapter)
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
            held, detail = False, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        yield Finding(claim, held, detail)


def sample_batch(model: PreTrainedModel) -> Batch:
    """Prompts of random token ids, always the same, of different lengths."""
    lengths = (12, 5, 9)
    generator = torch.Generator().manual_seed(0)
    vocabulary = min(text_config(model.config).vocab_size, 1000)  # image and audio tokens have the largest ids
    ids = torch.randint(0, vocabulary, (len(lengths), max(lengths)), generator=generator)
    mask = torch.stack([(torch.arange(max(lengths)) >= max(lengths) - n).long() for n in lengths])
    return Batch((ids * mask).to(model.device), mask.to(model.device))


@torch.no_grad()
def _is_inert(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> tuple[bool, str]:
    with _stock(model, batch.adapter):
        _, stock = batch.generate(model, DynamicCache(config=model.config))
    full = SkipCache(model, Schedule.full(schedule.num_layers))
    runs = [batch.generate(model, cache)[1] for cache in (DynamicCache(config=model.config), full)]
    same = all(torch.equal(stock, logits) for logits in runs)
    return same, f"{NEW_TOKENS} steps bit-identical" if same else "logits differ"


@torch.no_grad()
def _matches_uncached(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> tuple[bool, str]:
    tokens, logits = batch.generate(model, SkipCache(model, schedule))
    return _compare_with_reference(model, schedule, batch, tokens[:, :-1], logits)


@torch.no_grad()
def _training_matches(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> tuple[bool, str]:
    text = batch.generate(model, SkipCache(model, schedule))[0][:, :-1]
    with teacher_forced(model, schedule, batch.width):
        logits = batch.uncached(model, text)
    return _compare_with_reference(model, schedule, batch, text, logits)


@torch.no_grad()
def _matches_alone(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> tuple[bool, str]:
    together, alone = (batch.tokens(model, partial(SkipCache, model, schedule), one) for one in (False, True))
    equal = sum(a == b for a, b in zip(together, alone, strict=True))
    detail = f"{equal} of {len(alone)} sequences equal"
    if equal < len(alone):
        stock = partial(DynamicCache, config=model.config)
        if batch.tokens(model, stock) != batch.tokens(model, stock, alone=True):
            detail += "; the stock model's own texts depend on their left padding: use batch size 1"
    return equal == len(alone), detail


@torch.no_grad()
def _runs_repeat(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> tuple[bool, str]:
    cache = partial(SkipCache, model, schedule)
    first = batch.tokens(model, cache)
    batch.generate(model, cache(), sequence=1)
    equal = sum(a == b for a, b in zip(first, batch.tokens(model, cache), strict=True))
    return equal == len(first), f"{equal} of {len(first)} sequences equal"


@torch.no_grad()
def _work_falls(model: PreTrainedModel, schedule: Schedule, batch: Batch) -> tuple[bool, str]:
    names = {id(module): f"{type(model).__name__}.{name}" for name, module in model.named_modules()}
    layers = [names[id(layer)] for layer in decoder_layers(model)]
    least = schedule.flat(schedule.min_depth)
    running = sorted(bind(least, model.config).layers(schedule.min_depth))

    def flops(depth: int, new_tokens: int = NEW_TOKENS) -> Any:
        """FLOPs of generation by module."""
        with FlopCounterMode(display=False) as counter:
            batch.generate(model, SkipCache(model, least.flat(depth)), new_tokens=new_tokens)
        counts = counter.get_flop_counts()
        return {name: sum(counts[name].values()) for name in ("Global", *layers)}

    prompt, full, short = flops(len(layers), 1), flops(len(layers)), flops(schedule.min_depth)
    skipped = sum(full[name] - prompt[name] for index, name in enumerate(layers) if index not in running)
    bypasses = batch.adapter.flops(running) * len(batch.ids) * (NEW_TOKENS - 1) if batch.adapter else 0
    held = full["Global"] - short["Global"] == skipped - bypasses and skipped > bypasses
    return held, f"{full['Global']:,} to {short['Global']:,} at {len(running)} of {len(layers)} layers"


#: Each returns whether its claim holds, and what was measured, as text.
CHECKS: dict[str, Callable[[PreTrainedModel, Schedule, Batch], tuple[bool, str]]] = {
    "inert at full depth": _is_inert,
    "cached decoding = these layers without a cache": _matches_uncached,
    "a training pass = these layers without gates": _training_matches,
    "a sequence in a batch = the sequence alone": _matches_alone,
    "a second run generates the same": _runs_repeat,
    "FLOPs fall by the skipped layers' share": _work_falls,
}


@contextmanager
def discarding_skipped(
    model: nn.Module, schedule: Schedule, prompt_length: int, text: Tensor, adapter: Adapter | None = None
) -> Iterator[None]:
    """Context in which a stock model computes what skipping should: the reference of all checks.

    Every layer runs on all positions, and its output is replaced by its input where the schedule skips it. Attention is
    causal and each layer runs a prefix of the positions, so the replaced outputs do not affect the others.

    Args:
        model: a stock model, without gates.
        schedule: how many positions each layer runs.
        prompt_length: positions of the left-padded prompts.
        text: token ids (batch, positions) of the passes inside the context.
        adapter: acts in place of skipped layers.
    """
    counts = bind(schedule, model.config).positions_per_layer(prompt_length, text.shape[1])

    def axis_and_dropped(hidden: Tensor) -> tuple[int, int]:
        """Axis of positions, 1 but for streams before the batch; and leading positions that the model dropped."""
        axis = 2 if hidden.ndim == 4 and hidden.shape[1:3] == text.shape else 1
        return axis, text.shape[1] - hidden.shape[axis]

    def discard(index: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        computed = output[0] if isinstance(output, tuple) else output
        axis, dropped = axis_and_dropped(hidden)
        kept = max(counts[index] - dropped, 0)
        rest = hidden.narrow(axis, kept, hidden.shape[axis] - kept)
        mixed = torch.cat([computed.narrow(axis, 0, kept), rest], dim=axis)
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

    def apply_adapter(index: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        axis, dropped = axis_and_dropped(hidden)
        if adapter is not None:
            hidden = adapter.apply_before(index, hidden, axis, [max(count - dropped, 0) for count in counts])
        return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})

    hooks: list[Any] = []
    for index, layer in enumerate(decoder_layers(model)):
        hooks.append(layer.register_forward_pre_hook(partial(apply_adapter, index), with_kwargs=True))
        hooks.append(layer.register_forward_hook(partial(discard, index), with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def in_float64(model: PreTrainedModel, adapter: Adapter | None = None) -> Iterator[None]:
    """Context in which weights are float64; after it they have their dtypes and exact values again."""
    tensors = [*model.parameters(), *model.buffers(), *(adapter.parameters() if adapter else ())]
    dtypes = [tensor.dtype for tensor in tensors]
    try:
        model.double()
        if adapter is not None:
            adapter.double()
        yield
    finally:
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            tensor.data = tensor.data.to(dtype)


@contextmanager
def _stock(model: PreTrainedModel, adapter: Adapter | None) -> Iterator[None]:
    """Context without gates; a default schedule that the user attached is lost."""
    detach(model)
    try:
        yield
    finally:
        attach(model, adapter=adapter)


def _compare_with_reference(
    model: PreTrainedModel, schedule: Schedule, batch: Batch, text: Tensor, logits: Tensor
) -> tuple[bool, str]:
    with _stock(model, batch.adapter):
        tokens, stock = batch.generate(model, DynamicCache(config=model.config))
        rounding = _distance(stock, batch.uncached(model, tokens[:, :-1]))
        with discarding_skipped(model, schedule, batch.width, text, batch.adapter):
            error = _distance(logits, batch.uncached(model, text))
    if rounding > ROUNDING:
        return False, f"the stock model's own cached and uncached logits differ by {rounding:.1e}, beyond rounding"
    held = error <= max(TOLERANCE, TIMES_STOCK * rounding)
    return held, f"off by {error:.1e} of the largest logit (the stock model itself: {rounding:.1e})"


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max() / a.double().abs().max())


def _numbers(logits: Tensor) -> Tensor:
    if logits.isnan().any():
        raise ModelError("logits are NaN")
    return logits
