"""Weights and activations of 8 bits, for decoding on CPUs: layers and LM head, whatever the schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..core.stack import decoder_layers
from ..errors import ModelError, UnsupportedModel

#: Where Linux says what the CPU can do.
CPUINFO = Path("/proc/cpuinfo")
#: Less than this share of the layers' weights in modules that can be replaced is not worth the name.
SHARE = 0.9


class Int8Linear(nn.Module):
    """A linear module with one scale per output, and one per row of what it is given (symmetric, found as it comes).

    torch multiplies int8 by int8 into exact int32 sums. (On CPUs, torchao 0.18 turns both into int32 or float32 first:
    its products are slower than those of floats.) There is no ``weight``: a family that reads a module's weight past
    its forward fails instead of taking it for another.

    Args:
        weight: (outputs, inputs).
        bias: (outputs), or None.
    """

    int8_weight: Tensor
    int8_scale: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        scale = weight.float().abs().amax(1).clamp_min(1e-12) / 127
        self.register_buffer("int8_weight", (weight.float() / scale[:, None]).round().to(torch.int8))
        self.register_buffer("int8_scale", scale)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) to (…, outputs), in the type of ``x``."""
        rows = x.reshape(-1, self.in_features).float()
        scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        sums = torch._int_mm((rows / scale).round().to(torch.int8), self.int8_weight.t())
        y = sums * scale * self.int8_scale
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)


def check_int8(name: str, config: Any, device: str, capabilities: Mapping[str, Any]) -> None:
    """Whether a model of this config may be given int8 weights here; before its weights are read.

    Raises:
        ModelError: another device than a CPU, one without int8 products or of which that is not known, or a checkpoint
            that is quantized already.
    """
    if torch.device(device).type != "cpu":
        raise ModelError(f"quantization='int8' is for CPUs, not {device!r}: a GPU's int8 products take no single rows")
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{name} is quantized already: leave quantization out")
    # Without these, products of int8 are summed in 16 bits, which overflow, or are slower than floats.
    has = [key for key, have in capabilities.items() if have is True] or _cpu_flags()
    if not has:
        raise ModelError(
            "quantization='int8' needs a CPU that multiplies int8 (VNNI or AMX), and neither torch "
            f"{torch.__version__} nor {CPUINFO} says whether this one does: leave it out, or use a torch that has "
            "torch.cpu.get_capabilities"
        )
    if not any("vnni" in key or "int8" in key for key in has):
        raise ModelError("quantization='int8' needs a CPU that multiplies int8 (VNNI or AMX): leave it out")


def _cpu_flags() -> list[str]:
    """What the first CPU can do, as Linux names it; nothing elsewhere. For torch versions that do not say it."""
    with suppress(OSError):
        for line in CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, flags = line.partition(":")
            if name.strip() in ("flags", "Features"):  # of x86, of ARM
                return flags.split()
    return []


@torch.no_grad()
def quantize_int8(model: PreTrainedModel) -> PreTrainedModel:
    """Give the linear modules of all layers and the LM head int8 weights, in place. Returns the model.

    Embeddings, norms and what stands outside the layers stay; a head that is tied to the embedding gets weights of
    its own. The model can be decoded with, but not saved or trained.

    Raises:
        UnsupportedModel: the weights of its layers are not in linear modules (experts), or are read past them.
    """
    layers, head = decoder_layers(model), model.get_output_embeddings()
    check_linear(model)
    for parent, name, child in [*_linear(layers), *((p, n, c) for p, n, c in _linear(model) if c is head)]:
        weight = child.weight.t() if isinstance(child, Conv1D) else child.weight
        setattr(parent, name, Int8Linear(weight, child.bias))
    try:
        model(torch.tensor([[1, 2]], device=model.device))
    except (AttributeError, TypeError) as error:
        name = type(model).__name__
        raise UnsupportedModel(f"{name} reads its weights past their modules: no int8 ({error})") from error
    model.save_pretrained = _not_saved
    return model


def check_linear(model: PreTrainedModel) -> None:
    """Raises UnsupportedModel where the layers' weights are not in linear modules. (On the meta device too.)"""
    layers = decoder_layers(model)
    every = sum(weight.numel() for weight in layers.parameters() if weight.ndim > 1)
    linear = sum(child.weight.numel() for _, _, child in _linear(layers))
    if linear < SHARE * every:
        raise UnsupportedModel(
            f"only {linear / every:.0%} of the weights in {type(model).__name__}'s layers are in linear modules "
            "(experts are not): leave quantization='int8' out"
        )


def _linear(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """(parent, name, module) of each linear module."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) in (nn.Linear, Conv1D):
                yield parent, name, child


def _not_saved(*_: Any, **__: Any) -> NoReturn:
    raise ModelError("int8 weights are made when a model is loaded, and not saved: load it without quantization")
