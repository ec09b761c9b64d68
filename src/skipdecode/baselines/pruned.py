"""Baselines with fewer layers in place of skipped ones: static pruning, and a small model from scratch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..core.attach import attach, teacher_forced
from ..core.checkpoint_config import CONFIG_KEY, layer_count
from ..core.decays import flat_depth
from ..core.schedule import Schedule
from ..core.stack import decoder_layers
from ..errors import UnsupportedModel
from ..methods.base import Method


class Static(Method):
    """The layers that SkipDecode's order skips are cut out, for the prompt too; the rest is fine-tuned alike."""

    name = "static"
    label = "static pruning"
    fits_depths = False
    model_per_speedup = True

    def schedule(self, num_layers: int, speedup: float, lengths: Sequence[int]) -> Schedule:
        """Of the pruned model: all it has."""
        return Schedule.full(flat_depth(speedup, num_layers))

    def prepare(self, model: PreTrainedModel, speedup: float) -> PreTrainedModel:
        """The pruned model, with the weights of the layers it keeps: the warm-up layer and the top ones."""
        count = layer_count(model.config)
        depth = flat_depth(speedup, count)
        return prune(model, Schedule(count, depth, depth, horizon=1, decay="constant").layers(depth))


class Scratch(Static):
    """As many layers as static pruning keeps, with random weights."""

    name = "scratch"
    label = "small model from scratch"

    def prepare(self, model: PreTrainedModel, speedup: float) -> PreTrainedModel:
        """A new small model; nothing of the given one but its form. At 1x, such a model itself, to train on."""
        if speedup == 1:
            return model
        count = layer_count(model.config)
        return init_pruned(model, range(flat_depth(speedup, count)))


def prune(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A model of the same family that has only these of ``model``'s layers, in network order.

    Raises:
        UnsupportedModel: the rest of the model depends on how many layers there are, or a layer on its place.
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
    except (ValueError, RuntimeError) as error:  # a config or weights that do not fit each other any more
        raise UnsupportedModel(f"{what}: {str(error).splitlines()[0]}") from error
    # The proof: skipping the other layers gives the same logits.
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
    """Random weights, in the form of ``model`` with only these layers."""
    config = model.config
    values = {k: v for k, v in config.to_dict().items() if k not in (CONFIG_KEY, "_name_or_path")}
    count = config.num_hidden_layers
    for name, value in values.items():
        # What a config lists per layer (kinds of attention, say) is cut alike.
        if isinstance(value, list) and len(value) == count:
            values[name] = [value[layer] for layer in layers]
    if "attention_types" in values:  # GPT-Neo says the same once more, as runs of kinds
        values["attention_types"] = [[[kind], 1] for kind in values["attention_layers"]]
    names: dict[str, Any] = getattr(config, "attribute_map", {})
    values[names.get("num_hidden_layers", "num_hidden_layers")] = len(layers)
    small = type(config).from_dict(values)
    new = AutoModelForCausalLM.from_config(small, attn_implementation=config._attn_implementation, dtype=model.dtype)
    new.generation_config = model.generation_config
    return new.to(model.device)
