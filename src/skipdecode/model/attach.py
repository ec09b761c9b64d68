"""Put gates on a model, remove them, and run uncached passes that skip the layers which decoding would skip."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from torch import nn

from ..errors import ModelError, UsageError
from ..schedule import Schedule, choose_schedule
from .adapter import Adapter, load_adapter, locate_adapter
from .config import bind, config_schedules, warn_untrained
from .gate import (
    Gate,
    Gates,
    LinearGate,
    PatchedForward,
    PatchedGenerate,
    PatchedPrepareInputs,
    RefusedBatching,
    patches_on,
    put,
)
from .inspect import GATES, check_kind, decoder_layers, gates_of

Model = TypeVar("Model", bound=nn.Module)


def attach(
    model: Model,
    schedule: Schedule | None = None,
    *,
    speedup: float | None = None,
    adapter: Adapter | str | Path | None = None,
) -> Model:
    """Put a gate on every decoder layer and return the model. Without a :class:`SkipCache`, gates skip nothing.

    With a schedule or a speed-up, every ``model.generate`` call without a cache gets a new SkipCache, so that
    pipelines, trainers that generate and other libraries' loops skip layers too. An attached model is for one thread
    at a time.

    Args:
        model: a transformers causal LM.
        schedule: what later ``generate`` calls follow, in place of that of an earlier ``attach``.
        speedup: target whose schedule :func:`~skipdecode.schedule.choose_schedule` finds.
        adapter: an adapter, or the folder or Hub name of one, in use until :func:`detach`. From a folder it gets the
            model's dtype.

    Raises:
        UnsupportedModel: the model cannot skip layers exactly; the message says why.
        ScheduleError: the schedule does not fit the model, or the adapter was not trained to skip its layers.
        ModelError: the adapter was trained on another model; or a schedule is given for a model without ``generate``.

    Example:
        >>> model.generate(**inputs, cache=SkipCache(attach(model), Schedule.for_speedup(3, 24)))
        >>> attach(model, speedup=3)
        >>> pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=8)(prompts)
    """
    if (inside := model._modules.get("_orig_mod")) is not None:  # torch.compile(model) sets attributes on that one
        attach(inside, schedule, speedup=speedup, adapter=adapter)
        return model
    gates = gates_of(model)
    if gates is None:
        check_kind(model)
    layers = decoder_layers(model)
    gates = gates or Gates(model.config)
    if isinstance(adapter, (str, Path)):
        adapter = load_adapter(locate_adapter(adapter), model).to(dtype=next(model.parameters()).dtype)
        adapter.merge(model)
    if schedule is not None and speedup is not None:
        raise UsageError("give one of schedule and speedup")
    if schedule is not None or speedup is not None:
        if not hasattr(model, "generate"):
            raise ModelError(f"{type(model).__name__} does not generate: a speed-up is for the model with its head")
        acting = adapter or gates.adapter
        trained = config_schedules(model.config) if acting is None else acting.schedules
        schedule = schedule or choose_schedule(trained, len(layers), speedup)
        bind(schedule, model.config, None if acting is None else trained)
        warn_untrained(schedule, trained)
    for index, layer in enumerate(layers):
        put(Gate, layer, "forward", gates, index)
        setattr(layer, GATES, gates)
    # A wrapper around an attached model (PEFT's) has a ``forward`` and ``generate`` of its own: patch those too.
    put(PatchedForward, model, "forward", gates)
    put(PatchedPrepareInputs, model, "prepare_inputs_for_generation", gates)
    if adapter is not None:
        put_adapter(model, adapter)
    if schedule is not None:
        put(RefusedBatching, model, "init_continuous_batching", gates)
        put(PatchedGenerate, model, "generate", gates)
        gates.schedule = schedule
    return model


def put_adapter(model: nn.Module, adapter: Adapter | None) -> None:
    """Let an attached model use an adapter, in place of any earlier one; None: no adapter."""
    device = next(model.parameters()).device
    if adapter is not None and device.type != "meta":  # else accelerate brings the weights for each pass
        adapter.to(device)
    gates = gates_of(model)
    gates.adapter = adapter
    layers = decoder_layers(model)
    for name in () if adapter is None else adapter.loras:
        put(LinearGate, layers.get_submodule(name), "forward", gates, name)


def detach(model: Model) -> Model:
    """Remove everything that SkipDecode put on the model, and return the model as it was before."""
    for module in model.modules():
        vars(module).pop(GATES, None)
        for name, patch in list(patches_on(module)):
            # An attribute where accelerate keeps the original is no method of the class: it must not be deleted.
            if patch.was_instance_attribute or not hasattr(type(module), name):
                setattr(module, name, patch.original)
            else:
                delattr(module, name)
    return model


@contextmanager
def teacher_forced(model: nn.Module, schedule: Schedule, prompt_length: int) -> Iterator[None]:
    """Make uncached passes run each layer on only those positions on which decoding would run it.

    A pass with a cache other than a SkipCache raises CacheError: layers would store only part of the positions. With
    gradient checkpointing keep the backward pass inside as well, which recomputes layers.

    Args:
        model: an attached model.
        schedule: which layers each position runs.
        prompt_length: width in positions of the left-padded prompt block.
    """
    gates = gates_of(model)
    if gates is None:
        raise ModelError("the model has no gates: call skipdecode.attach(model) first")
    before = gates.forced
    trained = None if gates.adapter is None else gates.adapter.schedules
    gates.forced = TeacherForcedPass(bind(schedule, model.config, trained), prompt_length)
    try:
        yield
    finally:
        gates.forced = before


class TeacherForcedPass:
    """A teacher-forced pass, which tells gates how many positions to run, as a SkipCache does for a cached pass."""

    def __init__(self, schedule: Schedule, prompt_length: int) -> None:
        self.schedule = schedule
        self.prompt_length = prompt_length
        self.width = 0
        self.counts: list[int] = []  # number of positions of the pass that each layer runs, from the first on

    def begin_layer(self, index: int, width: int) -> int:
        """Number of the pass's ``width`` positions that layer ``index`` runs: the first ones; 0 if it is skipped."""
        if width > self.width or (index == 0 and width < self.width):  # recomputation may begin at any layer
            self.width = width
            self.counts = self.schedule.positions_per_layer(self.prompt_length, width)
        return self.counts[index]

    def keys(self, index: int) -> int:
        """Number of positions that a mask covers: those of the pass."""
        return self.width
