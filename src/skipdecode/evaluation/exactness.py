"""Checks that skipping is exact on a user's model, against a reference without gates and without SkipCache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, PreTrainedModel

from ..errors import NOT_FINITE, ModelError, UsageError
from ..loading.load import Checkpoint
from ..model.adapter import Adapter
from ..model.attach import attach, detach, teacher_forced
from ..model.cache import SkipCache
from ..model.cache_name import CACHE
from ..model.config import bind
from ..model.inspect import decoder_layers, gates_of, text_config
from ..model.lora import LoRA
from ..schedule import Schedule

#: Logits count as equal up to this relative error, or up to TIMES_STOCK times the stock model's own error between
#: cached and uncached logits. A stock error above ROUNDING is no rounding: the model attends to later positions.
TOLERANCE, TIMES_STOCK, ROUNDING = 1e-5, 10, 1e-3
#: Decode steps over which the depth falls, so that a short text runs all depths; and new tokens of the texts.
HORIZON, NEW_TOKENS = 8, 10
#: Tokens of the prompts.
LENGTHS = (12, 5, 9)
#: Options of ``model.generate``, whatever the model's generation_config says.
GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "use_cache": True}
GREEDY |= {"eos_token_id": None, "pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}


@dataclass(frozen=True)
class Finding:
    """The result of one check: the claim, whether it held, and the measured number or the reason."""

    claim: str
    held: bool
    detail: str


def check_model(checkpoint: Checkpoint, speedup: float | None = None, dtype: str = "float32") -> Iterator[Finding]:
    """Load a model and yield the findings of :func:`run_checks`.

    ``speedup`` names the schedule; None: the slowest trained one, else a falling one for 2x. ``dtype`` is
    :func:`skipdecode.load`'s. Raises UsageError if the schedule skips nothing, UnsupportedModel if no layer can be
    skipped.
    """
    if checkpoint.schedules:
        schedule = checkpoint.schedule(speedup)
    else:
        schedule = Schedule.for_speedup(speedup or 2, checkpoint.num_layers, decay="linear")
    if schedule.depths is None:
        schedule = schedule.replace(horizon=min(schedule.horizon, HORIZON))
    if schedule.is_full:
        raise UsageError("the schedule skips nothing: give a --speedup of 2 or more")
    model = checkpoint.load(dtype)
    yield from run_checks(model.to("cpu") if model.device.type == "mps" else model, schedule)  # mps has no float64


@torch.no_grad()
def run_checks(model: PreTrainedModel, schedule: Schedule) -> Iterator[Finding]:
    """Yield a finding for each claim of :data:`CHECKS` about a model with gates attached.

    Skipping can amplify rounding errors, so a claim that fails in the model's dtype is checked again in float64. Any
    error, of SkipDecode or of the model's own code, is a claim that does not hold.
    """
    subject, exact = _Subject(model, schedule), None
    for claim, check in CHECKS.items():
        try:
            held, detail = check(subject)
            if not held and model.dtype != torch.float64:
                exact = exact or subject.in_float64()
                held, in_float64 = check(exact)
                detail += f"; in float64: {in_float64}"
        except Exception as error:  # whatever a model raises, the claim does not hold for it
            held, detail = False, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        yield Finding(claim, held, detail)


class _Subject:
    """A model, a schedule, and left-padded prompts of random tokens: ``ids`` and ``mask`` (batch, positions)."""

    def __init__(self, model: PreTrainedModel, schedule: Schedule) -> None:
        self.model = model
        self.schedule = schedule
        self.width = max(LENGTHS)
        generator = torch.Generator().manual_seed(0)
        vocabulary = min(text_config(model.config).vocab_size, 1000)  # image and audio tokens have the largest ids
        ids = torch.randint(0, vocabulary, (len(LENGTHS), self.width), generator=generator)
        mask = torch.stack([(torch.arange(self.width) >= self.width - length).long() for length in LENGTHS])
        self.ids = (ids * mask).to(model.device)
        self.mask = mask.to(model.device)

    def in_float64(self) -> _Subject:
        """The same with a copy of the model, and of its adapter, in float64."""
        with self.stock() as adapter:
            model, adapter = deepcopy((self.model, adapter))
        if adapter is not None:
            adapter.double().private.clear()
        return _Subject(attach(model.double(), adapter=adapter), self.schedule)

    def generate(
        self, schedule: Schedule | None, sequence: int | None = None, new_tokens: int = NEW_TOKENS
    ) -> tuple[Tensor, Tensor]:
        """Tokens (batch, positions) and logits (batch, new tokens, vocabulary), of one ``sequence`` without padding.

        Without a schedule, the cache is transformers' own.
        """
        cache = DynamicCache(config=self.model.config) if schedule is None else SkipCache(self.model, schedule)
        ids, mask = self.ids, self.mask
        if sequence is not None:
            ids = ids[sequence : sequence + 1, mask[sequence] == 1]
            mask = torch.ones_like(ids)
        options = GREEDY | {CACHE: cache, "max_new_tokens": new_tokens}
        output: Any = self.model.generate(ids, attention_mask=mask, **options)
        return output.sequences, _finite(torch.stack(output.logits, 1))

    def equal_texts(self, first: Tensor, schedule: Schedule | None, alone: bool) -> tuple[bool, str]:
        """Whether another run, of the same batch or of each sequence ``alone``, generates the texts of the first."""
        runs = range(len(self.ids)) if alone else [None]
        texts = [self.generate(schedule, run)[0][:, -NEW_TOKENS:] for run in runs]
        equal = int((first[:, -NEW_TOKENS:] == torch.cat(texts)).all(1).sum())
        return equal == len(first), f"{equal} of {len(first)} sequences equal"

    def uncached(self, text: Tensor) -> Tensor:
        """Logits (batch, new tokens, vocabulary) that predict the new tokens of ``text``, from one pass."""
        mask = torch.cat([self.mask, self.mask.new_ones(len(text), text.shape[1] - self.width)], 1)
        options: dict[str, Any] = {"attention_mask": mask, "use_cache": False}
        if "position_ids" in inspect.signature(self.model.forward).parameters:
            options["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        return _finite(self.model(text, **options).logits[:, self.width - 1 :])

    @contextmanager
    def stock(self) -> Iterator[Adapter | None]:
        """Context without gates, with the adapter; a default schedule that the user attached is lost."""
        adapter = gates_of(self.model).adapter
        detach(self.model)
        try:
            yield adapter
        finally:
            attach(self.model, adapter=adapter)

    @cached_property
    def skipped(self) -> tuple[Tensor, Tensor]:
        """Tokens and logits of the model that skips."""
        return self.generate(self.schedule)

    @cached_property
    def unskipped(self) -> tuple[Tensor, Tensor]:
        """Tokens and logits of the stock model."""
        with self.stock():
            return self.generate(None)

    @cached_property
    def reference(self) -> tuple[Tensor, float]:
        """Logits of :func:`discarding_skipped` for the skipping model's text, and the stock model's own error."""
        text = self.skipped[0][:, :-1]
        tokens, logits = self.unskipped
        with self.stock() as adapter:
            rounding = _distance(logits, self.uncached(tokens[:, :-1]))
            with discarding_skipped(self.model, self.schedule, self.width, text, adapter):
                return self.uncached(text), rounding

    def equals_reference(self, logits: Tensor) -> tuple[bool, str]:
        """Whether logits of the skipping model's text are the reference's."""
        reference, rounding = self.reference
        if rounding > ROUNDING:
            return False, f"the stock model's own cached and uncached logits differ by {rounding:.1e}, beyond rounding"
        error = _distance(logits, reference)
        held = error <= max(TOLERANCE, TIMES_STOCK * rounding)
        return held, f"off by {error:.1e} of the largest logit (the stock model itself: {rounding:.1e})"


def _is_inert(subject: _Subject) -> tuple[bool, str]:
    runs = [subject.generate(each)[1] for each in (None, Schedule.full(subject.schedule.num_layers))]
    same = all(torch.equal(subject.unskipped[1], logits) for logits in runs)
    return same, f"{NEW_TOKENS} steps bit-identical" if same else "logits differ"


def _training_matches(subject: _Subject) -> tuple[bool, str]:
    text = subject.skipped[0][:, :-1]
    with teacher_forced(subject.model, subject.schedule, subject.width):
        logits = subject.uncached(text)
    return subject.equals_reference(logits)


def _matches_alone(subject: _Subject) -> tuple[bool, str]:
    held, detail = subject.equal_texts(subject.skipped[0], subject.schedule, alone=True)
    if not held and not subject.equal_texts(subject.unskipped[0], None, alone=True)[0]:
        detail += "; the stock model's own texts depend on their left padding: use batch size 1"
    return held, detail


def _runs_repeat(subject: _Subject) -> tuple[bool, str]:
    subject.generate(subject.schedule, sequence=1)  # of which nothing may stay behind
    return subject.equal_texts(subject.skipped[0], subject.schedule, alone=False)


def _work_falls(subject: _Subject) -> tuple[bool, str]:
    model, schedule = subject.model, subject.schedule
    names = {id(module): f"{type(model).__name__}.{name}" for name, module in model.named_modules()}
    layers = [names[id(layer)] for layer in decoder_layers(model)]
    least = schedule.flat(schedule.min_depth)
    running = sorted(bind(least, model.config).layers(schedule.min_depth))

    def flops(depth: int, steps: int) -> Any:
        """FLOPs of the prompt and of decode steps by module."""
        with FlopCounterMode(display=False) as counter:
            subject.generate(least.flat(depth), new_tokens=1 + steps)
        counts = counter.get_flop_counts()
        return {name: sum(counts[name].values()) for name in ("Global", *layers)}

    prompt, full, short = flops(len(layers), 0), flops(len(layers), 2), flops(schedule.min_depth, 2)
    skipped = sum(full[name] - prompt[name] for index, name in enumerate(layers) if index not in running)
    adapter = gates_of(model).adapter
    bypasses = adapter.flops(running) * len(LENGTHS) * 2 if adapter else 0
    held = full["Global"] - short["Global"] == skipped - bypasses and skipped > bypasses
    return held, f"{full['Global']:,} to {short['Global']:,} at {len(running)} of {len(layers)} layers"


#: Each returns whether its claim holds, and what was measured, as text.
CHECKS: dict[str, Callable[[_Subject], tuple[bool, str]]] = {
    "inert at full depth": _is_inert,
    "cached decoding = these layers without a cache": lambda subject: subject.equals_reference(subject.skipped[1]),
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

    def hidden_and_axis(args: Any, kwargs: Any) -> tuple[Tensor, int, int]:
        """A layer's input; its axis of positions, 1 but for streams before the batch; leading positions dropped."""
        hidden = args[0] if args else kwargs["hidden_states"]
        axis = 2 if hidden.ndim == 4 and hidden.shape[1:3] == text.shape else 1
        return hidden, axis, text.shape[1] - hidden.shape[axis]

    def apply_adapter(index: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden, axis, dropped = hidden_and_axis(args, kwargs)
        if adapter is not None:
            hidden = adapter.apply_before(index, hidden, axis, [max(count - dropped, 0) for count in counts])
        return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})

    def discard(index: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        hidden, axis, dropped = hidden_and_axis(args, kwargs)
        computed = output[0] if isinstance(output, tuple) else output
        kept = max(counts[index] - dropped, 0)
        rest = hidden.narrow(axis, kept, hidden.shape[axis] - kept)
        mixed = torch.cat([computed.narrow(axis, 0, kept), rest], dim=axis)
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

    def add_lora(lora: LoRA, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        width = args[0].shape[:-1].numel() // len(text)
        change = lora(args[0]).view(len(text), width, -1)
        skips = torch.arange(text.shape[1] - width, text.shape[1], device=change.device) >= min(counts)
        return output + (change * skips[:, None]).view(output.shape)

    layers = decoder_layers(model)
    with ExitStack() as hooks:
        for name, lora in () if adapter is None else adapter.loras.items():
            hooks.enter_context(layers.get_submodule(name).register_forward_hook(partial(add_lora, lora)))
        for index, layer in enumerate(layers):
            hooks.enter_context(layer.register_forward_pre_hook(partial(apply_adapter, index), with_kwargs=True))
            hooks.enter_context(layer.register_forward_hook(partial(discard, index), with_kwargs=True))
        yield


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max() / a.double().abs().max())


def _finite(logits: Tensor) -> Tensor:
    if not logits.amax(-1).isfinite().all():
        raise ModelError(NOT_FINITE)
    return logits
