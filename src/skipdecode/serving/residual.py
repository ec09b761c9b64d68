"""Find out what the residual is that a family's layers take and return: a part of the hidden states, or a leftover.

In most of vLLM's families a layer's input is the sum of its arguments ``hidden_states`` and ``residual``. In others
(Cohere, EXAONE 4) ``hidden_states`` is all of it, and layers ignore the residual. An adapter must know.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from ..errors import UnsupportedModel

#: Relative difference below which two results are the same, in any dtype that models run in.
SAME = 0.05


@torch.no_grad()
def adds_residual(layer: nn.Module, config: Any, device: torch.device) -> bool:
    """Run a layer on random input, with attention that returns zero, and return whether its input is a sum.

    Args:
        layer: with its weights, without a gate.
        config: vLLM's config.
        device: the layer's.

    Raises:
        UnsupportedModel: the layer cannot be run, or what it returns follows neither rule.
    """
    if "residual" not in inspect.signature(layer.forward).parameters:
        return False
    size, dtype = config.model_config.get_hidden_size(), config.model_config.dtype
    generator = torch.Generator().manual_seed(0)
    hidden, first, second = (torch.randn(2, size, generator=generator).to(device, dtype) for _ in range(3))
    attentions: list[Any] = [part for part in layer.modules() if isinstance(part, AttentionLayerBase)]
    for attention in attentions:
        attention.forward = lambda query, *args, **kwargs: torch.zeros_like(query)

    def run(hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        # Fused kernels write into their arguments.
        return layer(positions=torch.arange(2, device=device), hidden_states=hidden.clone(), residual=residual.clone())

    def same(one: Tensor, other: Tensor) -> bool:
        return bool((one - other).float().norm() <= SAME * other.float().norm())

    try:
        with set_current_vllm_config(config), set_forward_context(None, config, num_tokens=2):
            out, other, at_once = run(hidden, first), run(hidden, second), run(hidden + first, torch.zeros_like(first))
    except Exception as error:
        raise UnsupportedModel(f"no adapters for {type(layer).__name__} in vLLM: {error!r}"[:300]) from error
    finally:
        for attention in attentions:
            del attention.forward
    if out[1] is None or torch.equal(out[0], other[0]):
        return False
    if same(out[0] + out[1], at_once[0] + at_once[1]):
        return True
    raise UnsupportedModel(f"no adapters for {type(layer).__name__} in vLLM: its residual follows no known rule")
