"""Baselines that run a smaller model instead of skipping: static pruning, and a small model from scratch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..errors import UnsupportedModel
from ..model.attach import attach, teacher_forced
from ..model.config import CONFIG_KEY, num_layers
from ..model.inspect import decoder_layers
from ..schedule import Schedule, flat_depth
from .methods_base import Method


class Static(Method):
    """Static pruning: remove the layers that SkipDecode would skip, for the prompt too, then fine-tune the rest."""

    name = "static"
    label = "static pruning"
    fits_depths = False
    model_per_speedup = True
    takes_layers = True

    def schedule(self, num_layers: int, speedup: float, lengths: Sequence[int]) -> Schedule:
        """Return the schedule that runs all layers of the model pruned for ``speedup``."""
        return Schedule.full(flat_depth(speedup, num_layers))

    def prepare(self, model: PreTrainedModel, speedup: float, **layers: Any) -> PreTrainedModel:
        """Return the model cut to the layers that a constant schedule runs at ``speedup``, with their weights."""
        count = num_layers(model.config)
        depth = flat_depth(speedup, count)
        return prune(model, Schedule(count, depth, depth, 1, **layers).layers(depth))


class Scratch(Static):
    """A model with as many layers as static pruning keeps, and random weights."""

    name = "scratch"
    label = "small model from scratch"
    takes_layers = False

    def prepare(self, model: PreTrainedModel, speedup: float, **layers: Any) -> PreTrainedModel:
        """Return a small model with random weights and ``model``'s architecture; at 1x, ``model`` itself."""
        if speedup == 1:
            return model
        count = num_layers(model.config)
        return init_pruned(model, range(flat_depth(speedup, count)))


def prune(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Return a copy of ``model`` with only ``layers``, which are given in network order.

    Raises:
        UnsupportedModel: the other weights depend on the number of layers, or a layer's output on its index.
    """
    stack = decoder_layers(model)
    prefix = next(name for name, module in model.named_modules() if module is stack)
    weights = {}
    for name, tensor in model.state_dict().items():
        match = re.match(rf"{re.escape(prefix)}\.(\d+)\.(.*)", name)
        if match is None:
            weights[name] = tensor
        elif int(match[1]) in layers:
            weights[f"{prefix}.{list(layers).index(int(match[1]))}.{match[2]}"] = tensor
    what = f"{type(model).__name__} cannot be cut to layers {', '.join(map(str, layers))}"
    try:
        small = init_pruned(model, layers)
        small.load_state_dict(weights)
    except (ValueError, RuntimeError) as error:  # config and weights do not fit each other
        raise UnsupportedModel(f"{what}: {str(error).splitlines()[0]}") from error
    # Check that skipping the removed layers gives the same logits.
    order = (*layers, *(layer for layer in range(len(stack)) if layer not in layers))
    schedule = Schedule(len(stack), len(layers), len(layers), horizon=1, decay="constant", order=order)
    ids = torch.arange(2, 5, device=model.device)[None]
    training = model.training
    with torch.no_grad(), teacher_forced(attach(model).eval(), schedule, 0):
        expected = model(input_ids=ids, use_cache=False).logits
    model.train(training)
    with torch.no_grad():
        logits = small.eval()(input_ids=ids, use_cache=False).logits
    if not torch.allclose(logits, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())):
        raise UnsupportedModel(f"{what}: its layers depend on their place")
    return small.train(training)


def init_pruned(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Return a model with random weights, whose config is ``model``'s with only these layers."""
    config = model.config
    values = {k: v for k, v in config.to_dict().items() if k not in (CONFIG_KEY, "_name_or_path")}
    count = config.num_hidden_layers
    for name, value in values.items():
        # Lists with an entry per layer (attention types, for example) must keep one entry per layer.
        if isinstance(value, list) and len(value) == count:
            values[name] = [value[layer] for layer in layers]
    if "attention_types" in values:  # GPT-Neo has the attention types a second time, run-length encoded
        values["attention_types"] = [[[kind], 1] for kind in values["attention_layers"]]
    names: dict[str, Any] = getattr(config, "attribute_map", {})
    values[names.get("num_hidden_layers", "num_hidden_layers")] = len(layers)
    small = type(config).from_dict(values)
    new = AutoModelForCausalLM.from_config(small, attn_implementation=config._attn_implementation, dtype=model.dtype)
    new.generation_config = model.generation_config
    return new.to(model.device)
