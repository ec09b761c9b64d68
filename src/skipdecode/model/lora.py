"""LoRA (Hu et al., 2021) on the linear modules of layers that run, for positions that skip other layers."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .inspect import decoder_layers


class LoRA(nn.Module):
    """Low-rank change of a linear module's output, ``x A^T B^T``; B begins at 0, so that nothing changes at first.

    Args:
        inputs, outputs: of the linear module.
        rank: of the change.
    """

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.lora_B = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Change of the output, (…, outputs), for inputs (…, inputs), in their dtype."""
        if self.lora_A.device != x.device:  # layers may be on several devices
            self.to(x.device)
        return x @ self.lora_A.to(x.dtype).T @ self.lora_B.to(x.dtype).T

    @torch.no_grad()
    def merged(self, module: nn.Module) -> nn.Module:
        """Copy of the linear module with the change in its weight; the bias is shared."""
        bias: Any = getattr(module, "bias", None)
        own: Any = deepcopy(module, {id(bias): bias})
        change = self.lora_B.float() @ self.lora_A.float()
        own.weight += (change.T if isinstance(module, Conv1D) else change).to(own.weight)
        return own


def is_linear(module: nn.Module | None) -> bool:
    """Whether a module is torch's linear module or GPT-2's, and no subclass, which may do more."""
    return type(module) in (nn.Linear, Conv1D)


def linear_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Linear modules of all decoder layers, by the layer's index and the name in it, like ``15.self_attn.q_proj``."""
    named = decoder_layers(model).named_modules()
    return {name: module for name, module in named if is_linear(module)}


def layer_of(name: str) -> int:
    """Index of the layer of a linear module, from its name."""
    return int(name.partition(".")[0])


def linear_sizes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of all linear modules of decoder layers, by name."""
    sizes = {}
    for name, module in linear_modules(model).items():
        weight: Any = module.weight
        outputs, inputs = weight.T.shape if isinstance(module, Conv1D) else weight.shape
        sizes[name] = inputs, outputs
    return sizes
