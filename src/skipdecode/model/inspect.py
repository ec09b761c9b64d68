"""Parts of a model: its decoder layers, their gates, layers that share KV; and whether it can skip layers exactly."""

import inspect
from typing import Any

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from ..errors import ModelError, UnsupportedModel
from .cache_name import CACHE

#: Attribute of each decoder layer that holds the model's :class:`~skipdecode.model.gate.Gates`.
GATES = "_skipdecode_gates"


def text_config(config: Any) -> Any:
    """Part of a config that describes the decoder; a multimodal config has several parts."""
    return config.get_text_config(decoder=True)


def gates_of(model: nn.Module) -> Any:
    """:class:`~skipdecode.model.gate.Gates` of an attached model; None if it is not attached."""
    return next((vars(module)[GATES] for module in model.modules() if GATES in vars(module)), None)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The model's one stack of decoder layers. Raises UnsupportedModel for none, several, or an encoder."""
    count = text_config(_decoder_config(model)).num_hidden_layers
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count and _is_stack(m)]
    # A list inside the layers of another stack (experts, say) is part of a layer.
    inner = {id(part) for stack in stacks for part in stack.modules() if part is not stack}
    stacks = [stack for stack in stacks if id(stack) not in inner]
    if len(stacks) != 1:
        raise UnsupportedModel(
            f"{type(model).__name__} should hold one stack of {count} decoder layers that take hidden states; "
            f"{len(stacks)} were found"
        )
    return stacks[0]


def _decoder_config(model: nn.Module) -> Any:
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None:
        raise UnsupportedModel(f"{name} has no config: SkipDecode works on transformers' causal LMs")
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder model; SkipDecode works on decoder-only causal LMs")
    return config


def _is_stack(layers: nn.ModuleList) -> bool:
    """Whether each module takes hidden states first, as a decoder layer does."""
    return all(next(iter(inspect.signature(layer.forward).parameters), "") == "hidden_states" for layer in layers)


def check_kind(model: nn.Module) -> None:
    """Raise UnsupportedModel unless the model is causal and keeps its state only in transformers' cache."""
    inner = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    if inner is None:
        return
    name = type(inner).__name__
    config = _decoder_config(inner)
    if CACHE not in inspect.signature(inner.forward).parameters:
        raise UnsupportedModel(f"{name} takes no {CACHE}: its state is in no cache that could follow a schedule")
    if isinstance(inner, GenerationMixin) and not inner._supports_default_dynamic_cache():
        raise UnsupportedModel(f"{name} keeps a cache of its own kind, which cannot follow a schedule")
    if "shared" in (getattr(text_config(config), "indexer_types", None) or ()):
        raise UnsupportedModel(f"layers of {name} reuse what the layer below selected: none can be skipped")


def kv_shared_layers(config: Any) -> dict[int, int]:
    """Map each layer without keys and values of its own to the lower layer whose keys and values it attends to."""
    config = text_config(config)
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is None:
        if getattr(config, "num_kv_shared_layers", None):
            raise ModelError("this version of transformers does not say which layers share their KV: upgrade it")
        return {}
    borrowers = [layer for layer, mode in enumerate(modes) if str(mode).startswith("reuse")]
    if (sources := getattr(config, "kv_source_layers", None)) is not None:
        return {layer: sources[layer] for layer in borrowers}
    lenders = [(layer, kind) for layer, kind in enumerate(config.layer_types) if modes[layer] == "store"]
    return {b: max(layer for layer, kind in lenders if layer < b and kind == config.layer_types[b]) for b in borrowers}
