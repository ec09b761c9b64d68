"""Weights and activations of 8 bits, for decoding on CPUs: layers and LM head, whatever the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core.stack import decoder_layers
from ..errors import ModelError, UnsupportedModel
from .linear import DecodingLinear, is_replaced, plain_linear, replace_linear

#: Where Linux says what the CPU can do.
CPUINFO = Path("/proc/cpuinfo")
#: What stands for zero: oneDNN's products for CPUs of today take inputs without a sign.
ZERO = 128
#: oneDNN's products of one row take longer than those of four: there are too few sums to add to at once.
ROWS = 4
#: Less than this share of the layers' weights in modules that can be replaced is not worth the name.
SHARE = 0.9


class Int8Linear(DecodingLinear):
    """A linear module with one scale per output, and one per row of what it is given (symmetric, found as it comes).

    oneDNN multiplies int8 by int8 into exact int32 sums, over weights in a layout of its own. (On CPUs, torchao 0.18
    turns both into int32 or float32 first: its products are slower than those of floats.)

    Args:
        weight: (outputs, inputs).
        bias: (outputs), or None.
    """

    int8_weight: Tensor
    int8_scale: Tensor
    int8_zero: Tensor
    option = "quantization='int8'"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, None if bias is None else bias.float())
        weight = weight.detach()
        scale = weight.abs().amax(1).float().clamp_min(1e-12) / 127
        rounded = (weight / scale[:, None]).round_().to(torch.int8).contiguous()  # strides are not looked at
        self.register_buffer("int8_weight", torch.ops.onednn.qlinear_prepack(rounded, [8, self.in_features]))
        self.register_buffer("int8_scale", scale)
        self.register_buffer("int8_zero", torch.zeros(self.out_features, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) to (…, outputs), in the type of ``x``."""
        self.check_call(x)
        rows = x.reshape(-1, self.in_features)
        scale = rows.abs().amax(1, keepdim=True).float().clamp_min_(1e-12).div_(127)
        rounded = (rows / scale).round_().add_(ZERO).to(torch.uint8)
        product = _opaque_product if torch.compiler.is_compiling() else _product
        y = product(rounded, self.int8_weight, self.int8_scale, self.int8_zero)
        y = y.mul_(scale) if self.bias is None else torch.addcmul(self.bias, y, scale)
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)


def _product(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Exact sums of int8 products, times a scale per output, in float32: (rows, inputs) to (rows, outputs)."""
    rows = len(x)
    if rows < ROWS:
        x = nn.functional.pad(x, (0, 0, 0, ROWS - rows))
    y = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, ZERO, weight, scale, zero, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y[:rows]


# Inductor compiles oneDNN's products of constant weights only; one that it does not know it calls.
_opaque_product = torch.library.custom_op("skipdecode::int8_linear", _product, mutates_args=())


@_opaque_product.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], scale.shape[0]), dtype=torch.float32)


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
    if not _sums_exactly():
        raise ModelError(
            f"torch {torch.__version__} does not sum products of int8 exactly on this CPU (or its oneDNN is kept from "
            "using all that the CPU can): leave quantization='int8' out"
        )


def _sums_exactly() -> bool:
    """Whether sums are right where they would overflow 16 bits, and the product is there at all."""
    ones, zeros = torch.ones(16), torch.zeros(16, dtype=torch.int64)
    most = torch.full((16, 64), 127, dtype=torch.int8)
    x = (most.int() + ZERO).to(torch.uint8)
    with suppress(AttributeError, RuntimeError):
        for sign in (1, -1):
            weight = torch.ops.onednn.qlinear_prepack(sign * most, None)
            if not bool((_product(x, weight, ones, zeros) == sign * 127 * 127 * 64).all()):
                return False
        return True
    return False


def _cpu_flags() -> list[str]:
    """What the first CPU can do, as Linux names it; nothing elsewhere. For torch versions that do not say it."""
    with suppress(OSError):
        for line in CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, flags = line.partition(":")
            if name.strip() in ("flags", "Features"):  # of x86, of ARM
                return flags.split()
    return []


def quantize_int8(model: PreTrainedModel) -> PreTrainedModel:
    """Give the linear modules of all layers and the LM head int8 weights, in place. Returns the model.

    Embeddings, norms and what stands outside the layers stay; a head that is tied to the embedding gets weights of
    its own. The model can be decoded with, but not saved or trained.

    Raises:
        UnsupportedModel: the weights of its layers are not in linear modules (experts), or are read past them.
    """
    if not is_replaced(model, Int8Linear):
        check_linear(model)
        replace_linear(model, Int8Linear)
    return model


def check_linear(model: PreTrainedModel) -> None:
    """Raises UnsupportedModel where the layers' weights are not in linear modules. (On the meta device too.)"""
    layers = decoder_layers(model)
    every = sum(weight.numel() for weight in layers.parameters() if weight.ndim > 1)
    linear = sum(child.weight.numel() for _, _, child in plain_linear(layers))
    if linear < SHARE * every:
        raise UnsupportedModel(
            f"only {linear / every:.0%} of the weights in {type(model).__name__}'s layers are in linear modules "
            "(experts are not): leave quantization='int8' out"
        )
