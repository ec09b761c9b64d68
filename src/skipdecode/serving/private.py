"""Private copies of decoder layers with an adapter's LoRA merged into them, for tokens that skip layers.

They are made where vLLM has read the weights and not yet packed them, so that it packs theirs as well.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModel
from ..model.adapter import MAX_DISTANCE, Adapter, read_samples, sample
from .gate import PRIVATE, decoder_layers
from .settings import Serving


@contextmanager
def with_private_layers(adapter: Adapter | None, serving: Serving) -> Iterator[None]:
    """Context in which vLLM's loader adds private layers, as :func:`add_private_layers` does, to the model it loads."""
    if adapter is None or serving.adapter is None or not adapter.loras:
        yield
        return
    from vllm.model_executor.model_loader import base_loader

    samples = read_samples(serving.adapter)
    original = base_loader.process_weights_after_loading

    def process(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        add_private_layers(model, adapter, samples, serving.num_layers)
        original(model, *args, **kwargs)

    base_loader.process_weights_after_loading = process
    try:
        yield
    finally:
        base_loader.process_weights_after_loading = original


@torch.no_grad()
def add_private_layers(model: nn.Module, adapter: Adapter, samples: Mapping[str, Tensor], num_layers: int) -> None:
    """Give each layer with LoRA a private copy, which shares attention, norms and biases.

    ``samples`` are those of the base model's weights, by name. Raises UnsupportedModel if vLLM's weights are not where
    they tell.
    """
    known = {re.sub(r"^.*?\b(?=\d+\.)", "", name).removesuffix(".weight"): each for name, each in samples.items()}
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for index, layer in enumerate(decoder_layers(model, num_layers)):
        todo = {name for name in adapter.loras if name.startswith(f"{index}.")}
        if not todo:
            continue
        changed: dict[nn.Module, nn.Parameter] = {}
        for place, module in layer.named_modules():
            parent, _, leaf = place.rpartition(".")
            names = [".".join(filter(None, (str(index), parent, part))) for part in packed.get(leaf, [leaf])]
            if todo.isdisjoint(names):
                continue
            weight = module.weight.detach().clone()
            row = 0
            for name in names:
                lora = adapter.loras[name]
                part = weight[row : row + len(lora.lora_B)]
                there = known[name].float()
                moved = min((sample(each).float() - there).norm() / there.norm() for each in (part, part.T))
                if part.shape != (len(lora.lora_B), lora.lora_A.shape[1]) or not moved <= MAX_DISTANCE:
                    raise UnsupportedModel(f"vLLM keeps the weights of {name} in another way: LoRA cannot be merged")
                part += (lora.lora_B.float() @ lora.lora_A.float()).to(part)
                row += len(part)
            if row != len(weight):
                raise UnsupportedModel(f"{place} of layer {index} has more weights than {', '.join(names)}")
            todo.difference_update(names)
            changed[module] = nn.Parameter(weight, requires_grad=False)
        if todo:
            raise UnsupportedModel(f"vLLM's model has no {min(todo)}: this adapter's LoRA cannot run there")
        setattr(layer, PRIVATE, _with(layer, changed))


def _with(module: nn.Module, changed: Mapping[nn.Module, nn.Parameter]) -> nn.Module:
    """Copy of a module with other weights; parts in which nothing changes are shared."""
    if changed.keys().isdisjoint(module.modules()):
        return module
    own = copy(module)
    own._modules = {name: part and _with(part, changed) for name, part in module._modules.items()}
    own._parameters = dict(module._parameters)
    for name, value in vars(module).items():  # vLLM's Transformers backend replaces ``forward`` of instances
        if isinstance(value, MethodType) and value.__self__ is module:
            setattr(own, name, MethodType(value.__func__, own))
    if module in changed:
        own._parameters["weight"] = changed[module]
    return own
