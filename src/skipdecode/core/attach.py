"""Put gates on a model, take them off, and run passes that see what decoding would."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn

from ..errors import ModelError
from .checkpoint_config import schedule_for, warn_untrained
from .gate import ForcedPass, Gate, GateState
from .guards import BatchingGuard, CacheProvider, PassGuard, PromptGuard
from .patch import gate_state, patches_on, put, remove_patches
from .schedule import Schedule
from .stack import check_kind, decoder_layers, lenders, with_lenders_first

Model = TypeVar("Model", bound=nn.Module)


def attach(model: Model, schedule: Schedule | None = None, *, speedup: float | None = None) -> Model:
    """Put a gate on every decoder layer. Inert until a :class:`SkipCache` comes through. Returns the model.

    With a schedule or a speed-up, every ``model.generate`` call that brings no cache of its own gets a new SkipCache:
    pipelines, trainers that generate and other people's loops then skip layers too.

    Args:
        model: a transformers causal LM.
        schedule: what ``generate`` follows from now on; the last call of ``attach`` that gives one decides.
        speedup: the same as a target: the schedule of the model's config for it, or one in that style.

    Raises:
        UnsupportedModel: the model cannot skip layers exactly; the message says why.
        ScheduleError: the schedule does not fit the model.
        UsageError: both a schedule and a speed-up.
        ModelError: a speed-up for a model that does not generate.

    Warns:
        UntrainedWarning: the model was not trained to skip layers.

    Example:
        >>> attach(model)
        >>> model.generate(**inputs, past_key_values=SkipCache(model, Schedule.for_speedup(3, 24, horizon=64)))
        >>> attach(model, speedup=3)
        >>> pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=8)(prompts)
    """
    gates = gate_state(model)
    if gates is None:
        check_kind(model)
    layers = decoder_layers(model)
    if speedup is not None or schedule is not None:
        if not hasattr(model, "generate"):
            raise ModelError(f"{type(model).__name__} does not generate: attach a speed-up to the model with its head")
        schedule = schedule_for(model.config, speedup, schedule)
        warn_untrained(model.config, schedule)
    if gates is None:
        gates = GateState(frozenset(lenders(model.config)))
    for index, layer in enumerate(layers):
        put(Gate, layer, "forward", gates, index)
    # A wrapper put around an attached model (PEFT's) has entrances of its own.
    put(PassGuard, model, "forward", gates)
    put(PromptGuard, model, "prepare_inputs_for_generation", gates)
    if schedule is not None:
        put(CacheProvider, model, "generate", model)
        put(BatchingGuard, model, "init_continuous_batching")
        for _, patch in patches_on(model):
            if isinstance(patch, CacheProvider):
                patch.schedule = schedule
    return model


def detach(model: Model) -> Model:
    """Take off all that SkipDecode has put on the model, which is then as it was found. Returns the model."""
    remove_patches(model)
    return model


def is_attached(model: nn.Module) -> bool:
    """Whether the model's layers carry gates."""
    return gate_state(model) is not None


@contextmanager
def teacher_forced(model: nn.Module, schedule: Schedule, prompt_length: int) -> Iterator[None]:
    """Inside, an uncached pass of this thread runs each layer on just the positions that decoding would.

    A pass inside makes no cache unless asked to, and one with a cache other than a SkipCache (``model.generate``
    makes one) is a CacheError: its layers would store a part of the positions. With gradient checkpointing keep the
    backward pass inside as well: before 5.23, transformers' recomputation comes through the gates.

    Args:
        model: an attached model.
        schedule: must have as many layers as the model.
        prompt_length: width in positions of the left-padded prompt block.

    Raises:
        ScheduleError: the schedule is for another number of layers.
        ModelError: the model is not attached.
    """
    gates = gate_state(model)
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
