"""Put gates on a model, remove them, and run uncached passes that skip the layers which decoding would skip."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from torch import nn

from ..errors import ModelError, UsageError
from ..schedule import Schedule, choose_schedule
from .adapter import Adapter, load_adapter, locate_adapter
from .config import bind, config_schedules, num_layers, warn_untrained
from .gate import Gate, Gates, TeacherForcedPass
from .guards import BatchingGuard, CacheProvider, PassGuard, PromptGuard
from .inspect import check_kind, decoder_layers, kv_shared_layers
from .patch import gate_state, patches_on, put, remove_patches

Model = TypeVar("Model", bound=nn.Module)
#: Held while gates are put on a model, which is short.
ATTACHING = threading.Lock()


def attach(
    model: Model,
    schedule: Schedule | None = None,
    *,
    speedup: float | None = None,
    adapter: Adapter | str | Path | None = None,
) -> Model:
    """Put a gate on every decoder layer and return the model. Without a :class:`SkipCache`, gates skip nothing.

    With a schedule or a speed-up, every ``model.generate`` call without a cache gets a new SkipCache, so that
    pipelines, trainers that generate and other libraries' loops skip layers too.

    Args:
        model: a transformers causal LM.
        schedule: what later ``generate`` calls follow; it replaces the one of an earlier ``attach``.
        speedup: target for which to take the schedule of the adapter or the model's config, or to make one.
        adapter: an adapter, or the folder or hub name of one, that acts on positions that skip layers; its schedules
            take the place of those in the model's config until :func:`detach`. From a folder it gets the model's dtype.

    Raises:
        FileError: the adapter's folder is missing or damaged.
        UnsupportedModel: the model cannot skip layers exactly; the message says why.
        ScheduleError: the schedule does not fit the model, or the adapter was not trained to skip its layers.
        UsageError: both a schedule and a speed-up are given.
        ModelError: one of them is given for a model that has no ``generate``; or the adapter was trained on another
            model.

    Warns:
        UntrainedWarning: the model was not trained to skip layers.

    Example:
        >>> attach(model)
        >>> model.generate(**inputs, cache=SkipCache(model, Schedule.for_speedup(3, 24, decay="linear")))
        >>> attach(model, speedup=3)
        >>> pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=8)(prompts)
    """
    if (inside := model._modules.get("_orig_mod")) is not None:  # torch.compile(model) sets attributes on that one
        attach(inside, schedule, speedup=speedup, adapter=adapter)
        return model
    gates = gate_state(model)
    if gates is None:
        check_kind(model)
    layers = decoder_layers(model)
    if isinstance(adapter, (str, Path)):
        adapter = load_adapter(locate_adapter(adapter), model).to(dtype=next(model.parameters()).dtype)
    with ATTACHING:  # two threads' first calls must not make a state each
        gates = gate_state(model) or Gates(kv_shared_layers(model.config))
        if speedup is not None or schedule is not None:
            if not hasattr(model, "generate"):
                raise ModelError(f"{type(model).__name__} does not generate: a speed-up is for the model with its head")
            if speedup is not None and schedule is not None:
                raise UsageError("give one of schedule and speedup")
            acting = adapter or gates.adapter
            trained = config_schedules(model.config) if acting is None else acting.schedules
            schedule = schedule or choose_schedule(trained, num_layers(model.config), speedup)
            bind(schedule, model.config, acting and acting.schedules)
            warn_untrained(schedule, trained)
        if adapter is not None:
            put_adapter(model, adapter, gates)
        for index, layer in enumerate(layers):
            put(Gate, layer, "forward", gates, index)
        # A wrapper around an attached model (PEFT's) has a ``forward`` and ``generate`` of its own: patch those too.
        put(PassGuard, model, "forward", gates)
        put(PromptGuard, model, "prepare_inputs_for_generation", gates)
        if schedule is not None:
            put(CacheProvider, model, "generate", model)
            put(BatchingGuard, model, "init_continuous_batching")
            for _, patch in patches_on(model):
                if isinstance(patch, CacheProvider):
                    patch.schedule = schedule
    return model


def put_adapter(model: nn.Module, adapter: Adapter | None, gates: Gates | None = None) -> None:
    """Let the model's gates use the adapter; None: none."""
    gates = gates or gate_state(model)
    assert gates is not None, "attach comes first"
    if adapter is not None:
        device = next(model.parameters()).device
        if device.type != "meta":  # else accelerate brings the weights for each pass
            adapter.to(device)
    gates.adapter = adapter


def detach(model: Model) -> Model:
    """Remove everything that SkipDecode put on the model, and return the model as it was before."""
    remove_patches(model)
    return model


@contextmanager
def teacher_forced(model: nn.Module, schedule: Schedule, prompt_length: int) -> Iterator[None]:
    """Make this thread's uncached passes run each layer on only those positions on which decoding would run it.

    A pass makes no cache by default; one with a cache other than a SkipCache (as in ``model.generate``) raises
    CacheError, since layers would store only part of the positions. With gradient checkpointing keep the backward pass
    inside as well: before 5.23, transformers recomputes layers through the gates.

    Args:
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
    trained = None if gates.adapter is None else gates.adapter.schedules
    forced = TeacherForcedPass(bind(schedule, model.config, trained), prompt_length)
    gates.forced[thread] = forced
    try:
        yield
    finally:
        if before is None:
            del gates.forced[thread]
        else:
            gates.forced[thread] = before
