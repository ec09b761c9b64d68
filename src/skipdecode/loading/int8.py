"""Linear modules for decoding on CPUs: int8 weights, or float weights prepacked for the CPU's kernels."""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import ModelError, UsageError
from ..model.inspect import decoder_layers

#: Zero point of int8 inputs: oneDNN's fast kernels take unsigned ones.
ZERO = 128
#: Int8 inputs are padded to four rows, since oneDNN is slower with fewer.
ROWS = 4


class CPULinear(nn.Module):
    """Linear module that keeps its weight in a form of its own. It can be neither trained nor saved.

    Args:
        weight: (outputs, inputs).
        bias: (outputs), or None.
    """

    option: ClassVar[str]

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @classmethod
    def check(cls) -> None:
        """ModelError if this CPU's results would be wrong."""


class Int8Linear(CPULinear):
    """Int8 weights with a scale per output, and inputs rounded to int8 with a scale per row (W8A8).

    oneDNN multiplies int8 by int8 into exact int32 sums. torchao 0.18 converts both to int32 or float32 on CPUs, which
    is slower than float weights.
    """

    option = "quantization='int8'"
    int8_weight: Tensor
    int8_scale: Tensor
    int8_zero: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, None if bias is None else bias.float())
        weight = weight.detach()
        scale = weight.abs().amax(1).float().clamp_min(1e-12) / 127
        rounded = (weight / scale[:, None]).round_().to(torch.int8).contiguous()  # oneDNN ignores strides
        self.register_buffer("int8_weight", torch.ops.onednn.qlinear_prepack(rounded, [8, self.in_features]))
        self.register_buffer("int8_scale", scale)
        self.register_buffer("int8_zero", torch.zeros(self.out_features, dtype=torch.int64))

    @torch.compiler.disable  # inductor supports this oneDNN kernel for constant weights only
    def forward(self, x: Tensor) -> Tensor:
        """Map (…, inputs) to (…, outputs), in the dtype of ``x``."""
        rows = x.reshape(-1, self.in_features)
        scale = rows.abs().amax(1, keepdim=True).float().clamp_min_(1e-12).div_(127)
        rounded = (rows / scale).round_().add_(ZERO).to(torch.uint8)
        y = _product(rounded, self.int8_weight, self.int8_scale, self.int8_zero)
        y = y.mul_(scale) if self.bias is None else torch.addcmul(self.bias, y, scale)
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    @classmethod
    def check(cls) -> None:
        """ModelError if int8 sums overflow: CPUs without VNNI or AMX add pairs of products in 16 bits."""
        ones = torch.ones(16)
        zeros = torch.zeros(16, dtype=torch.int64)
        most = torch.full((16, 64), 127, dtype=torch.int8)
        x = (most.int() + ZERO).to(torch.uint8)
        exact = False
        with suppress(AttributeError, RuntimeError):  # this torch has no such kernel
            sums = [_product(x, torch.ops.onednn.qlinear_prepack(sign * most, None), ones, zeros) for sign in (1, -1)]
            exact = bool((sums[0] == 127 * 127 * 64).all() and (sums[1] == -127 * 127 * 64).all())
        if not exact:
            raise ModelError("quantization='int8' needs a CPU with VNNI or AMX, and a torch with oneDNN: leave it out")


class PackedLinear(CPULinear):
    """Bfloat16 or float32 weight in the blocked layout of oneDNN's kernels.

    ``F.linear`` on a CPU converts the weight to that layout at every call. In bfloat16 results are equal to the bit on
    CPUs without AMX; in float32 they round differently, since ``F.linear`` uses another kernel.
    """

    option = "prepack"
    packed_weight: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        # The batch size that the layout is made for, 1 here, made no measurable difference.
        self.register_buffer("packed_weight", torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1))

    @torch.compiler.disable  # inductor supports this oneDNN kernel for constant weights only
    def forward(self, x: Tensor) -> Tensor:
        """Map (…, inputs) to (…, outputs), in the dtype of the weight."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed_weight, self.bias, "none", [], "")


def linear_class(quantization: str | None, prepack: bool, device: str) -> type[CPULinear] | None:
    """Class that replaces linear modules; None if both options are off.

    Raises:
        UsageError: an unknown quantization, both options, or a device other than the CPU.
        ModelError: this CPU's int8 products are not exact.
    """
    if quantization not in (None, "int8"):
        raise UsageError(f"quantization is int8 or None, not {quantization!r}")
    if quantization and prepack:
        raise UsageError("int8 weights are packed already: leave quantization or prepack out")
    if not quantization and not prepack:
        return None
    kind = Int8Linear if quantization else PackedLinear
    if torch.device(device).type != "cpu":
        raise UsageError(f"{kind.option} is for CPUs, not {device!r}: leave it out")
    kind.check()
    return kind


def optimize(model: PreTrainedModel, quantization: str | None = None, prepack: bool = False) -> PreTrainedModel:
    """Make decoding on a CPU faster at any depth, in place, and return the model. Call it before ``attach``.

    Linear modules of the decoder layers and the LM head are replaced one by one, so that one weight at most is in
    memory twice. A head that is tied to the embedding gets a weight of its own. Without options, only the head's 16-bit
    inputs are made contiguous. Errors are those of :func:`linear_class`.
    """
    head = model.get_output_embeddings()
    if kind := linear_class(quantization, prepack, str(model.device)):
        places = _linear_places(decoder_layers(model))
        for parent, name in places:
            setattr(parent, name, _replacement(getattr(parent, name), kind))
        if _plain(head):
            model.set_output_embeddings(_replacement(head, kind))
            head = model.get_output_embeddings()
        model.requires_grad_(False)
        model.save_pretrained = functools.partial(_refuse_to_save, kind.option)
    if head is not None:
        head.register_forward_pre_hook(_contiguous)
    return model


def _refuse_to_save(option: str, *_: Any, **__: Any) -> NoReturn:
    raise ModelError(f"a model loaded with {option} cannot be saved: load it without")


def _linear_places(layers: nn.Module) -> list[tuple[nn.Module, str]]:
    """Parent and name of each linear module."""
    return [(parent, name) for parent in layers.modules() for name, child in parent.named_children() if _plain(child)]


def _plain(module: nn.Module | None) -> bool:
    """Whether a module is torch's linear module, or GPT-2's with a transposed weight, and no subclass of these."""
    return type(module) in (nn.Linear, Conv1D)


def _replacement(module: Any, kind: type[CPULinear]) -> CPULinear:
    return kind(module.weight.t() if isinstance(module, Conv1D) else module.weight, module.bias)


def _product(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Product of (rows, inputs) with a packed weight: float32 (rows, outputs), exact sums times a scale per output."""
    rows = len(x)
    if rows < ROWS:
        x = nn.functional.pad(x, (0, 0, 0, ROWS - rows))
    return torch.ops.onednn.qlinear_pointwise(
        x, 1.0, ZERO, weight, scale, zero, None, 1.0, 0, torch.float32, "none", [], ""
    )[:rows]


def _contiguous(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copy of 16-bit inputs in memory of their own.

    ``generate`` passes the head a view of the last prompt positions, for which torch's CPU kernels copy the head's
    weight once per sequence. In float32 another kernel would run, whose bits differ from the full model's.
    """
    return tuple(x.contiguous() if isinstance(x, Tensor) and x.element_size() < 4 else x for x in args)
