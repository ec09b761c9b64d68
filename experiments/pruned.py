"""Baselines that run a smaller model instead of skipping: static pruning, and a small model from scratch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from skipdecode import Schedule, attach, teacher_forced
from skipdecode.errors import UnsupportedModel
from skipdecode.model.config import CONFIG_KEY
from skipdecode.model.inspect import decoder_layers


def prune(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Copy of a model with only ``layers``, which are in network order.

    UnsupportedModel: other weights depend on the number of layers, or a layer's output on its index.
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
        small = small_model(model, layers)
        small.load_state_dict(weights)
    except (ValueError, RuntimeError) as error:  # config and weights do not fit each other
        raise UnsupportedModel(f"{what}: {str(error).splitlines()[0]}") from error
    # Skipping the removed layers must give the same logits.
    order = (*layers, *(layer for layer in range(len(stack)) if layer not in layers))
    schedule = Schedule(len(stack), len(layers), len(layers), horizon=1, decay="constant", order=order)
    ids = torch.arange(2, 5, device=model.device)[None]
    with torch.no_grad(), teacher_forced(attach(model).eval(), schedule, 0):
        expected = model(input_ids=ids, use_cache=False).logits
    with torch.no_grad():
        logits = small.eval()(input_ids=ids, use_cache=False).logits
    if not torch.allclose(logits, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())):
        raise UnsupportedModel(f"{what}: its layers depend on their place")
    return small


def small_model(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Model with random weights, whose config is that of ``model`` with only these layers."""
    config = model.config
    values = {k: v for k, v in config.to_dict().items() if k not in (CONFIG_KEY, "_name_or_path")}
    for name, value in values.items():
        # Lists with an entry per layer (attention types, for example) keep one entry per layer.
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            values[name] = [value[layer] for layer in layers]
    if "attention_types" in values:  # GPT-Neo has the attention types a second time, run-length encoded
        values["attention_types"] = [[[kind], 1] for kind in values["attention_layers"]]
    names: dict[str, Any] = getattr(config, "attribute_map", {})
    values[names.get("num_hidden_layers", "num_hidden_layers")] = len(layers)
    small = type(config).from_dict(values)
    new = AutoModelForCausalLM.from_config(small, attn_implementation=config._attn_implementation, dtype=model.dtype)
    new.generation_config = model.generation_config
    return new.to(model.device)
