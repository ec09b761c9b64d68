"""Put gates on a model, take them off, and run passes that see what decoding would."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn

from ..errors import ModelError, UsageError
from .checkpoint_config import schedule_for
from .gate import ForcedPass, Gate, GateState, Patch
from .guards import CacheProvider, PassGuard, PromptGuard
from .schedule import Schedule
from .stack import check_kind, decoder_layers, lenders, with_lenders_first

#: A model is given back as what it is.
Model = TypeVar("Model", bound=nn.Module)

PREPARE, GENERATE = "prepare_inputs_for_generation", "generate"


def attach(model: Model, schedule: Schedule | None = None, *, speedup: float | None = None) -> Model:
    """Put a gate on every decoder layer. Inert until a :class:`SkipCache` comes through. Returns the model.

    With a schedule or a speed-up, every ``model.generate`` call that brings no cache of its own gets a new SkipCache:
    pipelines, trainers that generate and other people's loops then skip layers too.

    Args:
        model: a transformers causal LM.
        schedule: what ``generate`` follows from now on; the last call of ``attach`` that gives one decides.
        speedup: the same as a target: the schedule of the model's config for it, or one in that form.

    Raises:
        UnsupportedModel: the model cannot skip layers exactly; the message says why.
        ScheduleError: the schedule does not fit the model.
        UsageError: both a schedule and a speed-up.
        ModelError: a speed-up for a model that does not generate.

    Example:
        >>> attach(model)
        >>> model.generate(**inputs, past_key_values=SkipCache(model, Schedule.for_speedup(3, 24, horizon=64)))
        >>> attach(model, speedup=3)
        >>> pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=8)(prompts)
    """
    if schedule is not None and speedup is not None:
        raise UsageError("give one of schedule and speedup")
    gates = next((patch.gates for _, _, patch in _patches(model)), None)
    if gates is None:
        check_kind(model)
    layers = decoder_layers(model)
    if schedule is not None or speedup is not None:
        if not hasattr(model, GENERATE):
            raise ModelError(f"{type(model).__name__} does not generate: attach a speed-up to the model with its head")
        schedule = with_lenders_first(schedule_for(model.config, speedup, schedule), model.config)
    if gates is None:
        gates = GateState(frozenset(lenders(model.config)))
    for index, layer in enumerate(layers):
        if not _patches_on(layer):
            layer.forward = Gate(layer, gates, index)
    # A wrapper put around an attached model (PEFT's) has entrances of its own.
    if not any(isinstance(patch, PassGuard) for _, patch in _patches_on(model)):
        model.forward = PassGuard(model, "forward", gates)
        if hasattr(model, PREPARE):
            setattr(model, PREPARE, PromptGuard(model, PREPARE, gates))
    if schedule is not None:
        provider = next((patch for _, patch in _patches_on(model) if isinstance(patch, CacheProvider)), None)
        if provider is None:
            setattr(model, GENERATE, CacheProvider(model, gates, schedule))
        else:
            provider.schedule = schedule
    return model


def detach(model: Model) -> Model:
    """Take the gates off; the model is as it was found. Returns the model."""
    for module, name, patch in list(_patches(model)):
        # accelerate keeps what it found under another name.
        if patch.was_instance_attribute or name not in ("forward", GENERATE, PREPARE):
            setattr(module, name, patch.original)
        else:
            delattr(module, name)
    return model


def is_attached(model: nn.Module) -> bool:
    """Whether the model's layers carry gates."""
    return bool(_patches_on(decoder_layers(model)[0]))


@contextmanager
def teacher_forced(model: nn.Module, schedule: Schedule, prompt_length: int) -> Iterator[None]:
    """Inside, an uncached pass of this thread runs each layer on just the positions that decoding would.

    With gradient checkpointing keep the backward pass inside as well: before 5.23, transformers' recomputation comes
    through the gates.

    Args:
        model: an attached model.
        schedule: must have as many layers as the model.
        prompt_length: width in positions of the left-padded prompt block.

    Raises:
        ScheduleError: the schedule is for another number of layers.
        ModelError: the model is not attached.
    """
    gates = next((patch.gates for _, _, patch in _patches(model)), None)
    if gates is None:
        raise ModelError("the model has no gates: call skipdecode.attach(model) first")
    thread = threading.get_ident()
    before = gates.forced.get(thread)
    gates.forced[thread] = ForcedPass(with_lenders_first(schedule, model.config), prompt_length)
    try:
        yield
    finally:
        if before is None:
            del gates.forced[thread]
        else:
            gates.forced[thread] = before


def _patches(model: nn.Module) -> Iterator[tuple[nn.Module, str, Patch]]:
    """All that stands on the model and its modules, below accelerate's hooks too: (module, attribute, it)."""
    for module in model.modules():
        for name, patch in _patches_on(module):
            yield module, name, patch


def _patches_on(module: nn.Module) -> list[tuple[str, Patch]]:
    return [(name, value) for name, value in vars(module).items() if isinstance(value, Patch)]
