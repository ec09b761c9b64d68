"""Each decoder layer's ``forward`` runs, runs on a prefix of the columns, or passes the hidden states on.

The gate sits on the layer *instance*: no model subclass, no copied modelling code, state-dict keys stay as they are.
It acts only when a forward pass carries a :class:`~skipdecode.cache.SkipCache` or runs inside :func:`teacher_forced`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .cache import SkipCache
from .errors import CacheError, ModelError, ScheduleError
from .schedule import Schedule

PREPARE = "prepare_inputs_for_generation"


class Gate:
    """Stands in for one layer's ``forward``."""

    def __init__(self, forward: Callable[..., Any], shadowed: Any, index: int, plan: Plan) -> None:
        self.forward = forward
        self.shadowed = shadowed  # an instance-level forward found there (accelerate's hooks), to be put back
        self.index = index
        self.plan = plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output on the columns it runs; the other columns' hidden states unchanged."""
        hidden = args[0] if args else kwargs["hidden_states"]
        width = hidden.shape[1]
        cache = next((v for v in (*args, *kwargs.values()) if isinstance(v, SkipCache)), None)
        if cache is not None:
            columns = cache.begin_layer(self.index, width)
        elif self.plan.columns is not None:
            columns = self.plan.columns[self.index]
        else:
            return self.forward(*args, **kwargs)
        if width > 1 and self.index == 0:  # once a pass: to look into position ids waits for the device
            _refuse_packed(kwargs)
        if columns == 0:
            return self.plan.like_output(hidden)
        if columns < width:
            args, kwargs = _prefix(args, width, columns), _prefix(kwargs, width, columns)
        output = self.forward(*args, **kwargs)
        self.plan.extras = len(output) - 1 if isinstance(output, tuple) else None
        if columns == width:
            return output
        ran = output[0] if isinstance(output, tuple) else output
        return self.plan.like_output(torch.cat([ran, hidden[:, columns:].to(ran.device)], dim=1))


class PromptGuard:
    """Stands in for ``prepare_inputs_for_generation``, which alone is told that a pass belongs to a prompt."""

    def __init__(self, prepare: Callable[..., Any], shadowed: Any) -> None:
        functools.update_wrapper(self, prepare)  # ``generate`` reads the signature
        self.prepare = prepare
        self.shadowed = shadowed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model inputs, if the cache can take them."""
        cache = kwargs.get("past_key_values")
        # A decode step is told its length, 1. (Before 5.23, a chunk of a prompt is told nothing at all.)
        prompt = kwargs.get("is_first_iteration") or kwargs.get("next_sequence_length") is None
        if prompt and isinstance(cache, SkipCache):
            cache.begin_prompt()
        return self.prepare(*args, **kwargs)


class Plan:
    """What the gates of one model share."""

    def __init__(self) -> None:
        #: Columns each layer runs in a teacher-forced pass; None outside one.
        self.columns: list[int] | None = None
        #: What a layer returns beside its hidden states (older families return a tuple); None: nothing, a tensor.
        self.extras: int | None = None

    def like_output(self, hidden: Tensor) -> Any:
        """``hidden`` in the form that the layers of this model return."""
        return hidden if self.extras is None else (hidden, *[None] * self.extras)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The model's stack of decoder layers, whatever the family calls it.

    Raises:
        ModelError: encoder-decoder models, and models whose stack cannot be told.
    """
    config = getattr(model, "config", None)
    if config is None:
        raise ModelError(f"{type(model).__name__} has no config: SkipDecode works on transformers' causal LMs")
    if config.is_encoder_decoder:
        raise ModelError(
            f"{type(model).__name__} is an encoder-decoder model; SkipDecode works on decoder-only causal LMs"
        )
    count = config.get_text_config(decoder=True).num_hidden_layers
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    stacks = [m for m in stacks if len({type(layer) for layer in m}) == 1 and hasattr(m[0], "forward")]
    if len(stacks) != 1:
        raise ModelError(
            f"{type(model).__name__} should hold one stack of {count} like decoder layers; {len(stacks)} were found"
        )
    return stacks[0]


def attach(model: nn.Module) -> nn.Module:
    """Put a gate on every decoder layer. Inert until a :class:`SkipCache` comes through. Returns the model.

    Example:
        >>> attach(model)
        >>> model.generate(**inputs, past_key_values=SkipCache(model, Schedule.for_speedup(3, 24, horizon=64)))
    """
    layers = decoder_layers(model)
    if not is_attached(model):
        plan = Plan()
        for index, layer in enumerate(layers):
            layer.forward = Gate(layer.forward, layer.__dict__.get("forward"), index, plan)
        if hasattr(model, PREPARE):
            setattr(model, PREPARE, PromptGuard(getattr(model, PREPARE), model.__dict__.get(PREPARE)))
    return model


def detach(model: nn.Module) -> nn.Module:
    """Take the gates off; the model is as it was found. Returns the model."""
    for module, name in [*((layer, "forward") for layer in decoder_layers(model)), (model, PREPARE)]:
        ours = module.__dict__.get(name)
        if isinstance(ours, (Gate, PromptGuard)):
            delattr(module, name)
            if ours.shadowed is not None:
                setattr(module, name, ours.shadowed)
    return model


def is_attached(model: nn.Module) -> bool:
    """Whether the model's layers carry gates."""
    return isinstance(decoder_layers(model)[0].__dict__.get("forward"), Gate)


@contextmanager
def teacher_forced(model: nn.Module, schedule: Schedule, prompt_length: int, length: int) -> Iterator[None]:
    """Inside, an uncached pass over ``length`` columns runs each layer on just the columns that decoding would.

    With gradient checkpointing keep the backward pass inside as well: before 5.23, transformers' recomputation comes
    through the gates.

    Args:
        model: an attached model.
        schedule: must have as many layers as the model.
        prompt_length: width in columns of the left-padded prompt block.
        length: columns in all.
    """
    layers = decoder_layers(model)
    gate = layers[0].__dict__.get("forward")
    if not isinstance(gate, Gate):
        raise ModelError("the model has no gates: call skipdecode.attach(model) first")
    if schedule.num_layers != len(layers):
        raise ScheduleError(f"the schedule is for {schedule.num_layers} layers, the model has {len(layers)}")
    before, gate.plan.columns = gate.plan.columns, schedule.columns(prompt_length, length)
    try:
        yield
    finally:
        gate.plan.columns = before


def _prefix(value: Any, width: int, n: int) -> Any:
    """Keep the first ``n`` of ``width`` columns in whatever a layer is given besides its cache.

    Hidden states and position embeddings (batch, width, …), position ids (batch, width), masks (batch, heads, width,
    width), biases per key (batch and heads, 1, width).
    """
    if isinstance(value, Tensor):
        if value.ndim == 4:
            return value[..., :n, :n]
        if value.ndim == 3 and value.shape[1] == 1 and value.shape[2] == width:
            return value[..., :n]
        if value.ndim >= 2 and value.shape[1] == width:
            return value[:, :n]
        return value[:n] if value.ndim == 1 and value.shape[0] == width else value
    if isinstance(value, dict):
        return {key: _prefix(item, width, n) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_prefix(item, width, n) for item in value)
    return value


def _refuse_packed(kwargs: dict[str, Any]) -> None:
    """Several sequences in one row have no common prompt edge: no prefix of the columns belongs to a layer."""
    positions = kwargs.get("position_ids")
    packed = any(key.startswith("cu_seq_lens") and value is not None for key, value in kwargs.items())
    if not packed and isinstance(positions, Tensor) and positions.ndim == 2:
        packed = bool((((positions[:, :-1] == 0) & (positions[:, 1:] == 1)).sum(1) > 1).any())
    if packed:
        raise CacheError("packed (padding-free) batches cannot skip layers: give one sequence per row, left-padded")
