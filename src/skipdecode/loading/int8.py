"""Linear modules for decoding on CPUs: int8 weights, or float weights prepacked for the CPU's kernels."""

from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import ModelError, UsageError
from ..model.inspect import decoder_layers
from ..model.lora import is_linear

#: Zero point of int8 inputs: oneDNN's fast kernels take unsigned ones.
ZERO = 128
#: Int8 inputs are padded to four rows, since oneDNN is slower with fewer.
ROWS = 4


class Int8Linear(nn.Module):
    """Int8 weights with a scale per output, and inputs rounded to int8 with a scale per row (W8A8).

    oneDNN multiplies int8 by int8 into exact int32 sums; torchao 0.18 is slower on CPUs than float weights.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        weight = weight.detach()
        self.shape = weight.shape
        self.scale = weight.abs().amax(1).float().clamp_min(1e-12) / 127
        rounded = (weight / self.scale[:, None]).round_().to(torch.int8).contiguous()  # oneDNN ignores strides
        self.packed = torch.ops.onednn.qlinear_prepack(rounded, [8, self.shape[1]])
        self.zero = torch.zeros(self.shape[0], dtype=torch.int64)
        self.offset = None if bias is None else bias.detach().float()

    @torch.compiler.disable  # inductor supports this oneDNN kernel for constant weights only
    def forward(self, x: Tensor) -> Tensor:
        """Map (…, inputs) to (…, outputs), in the dtype of ``x``."""
        rows = x.reshape(-1, self.shape[1])
        scale = rows.abs().amax(1, keepdim=True).float().clamp_min_(1e-12).div_(127)
        rounded = (rows / scale).round_().add_(ZERO).to(torch.uint8)
        y = _product(rounded, self.packed, self.scale, self.zero)
        y = y.mul_(scale) if self.offset is None else torch.addcmul(self.offset, y, scale)
        return y.to(x.dtype).view(*x.shape[:-1], self.shape[0])


class PackedLinear(nn.Module):
    """Bfloat16 or float32 weight in the blocked layout of oneDNN's kernels, which ``F.linear`` makes at every call.

    In bfloat16 results are equal to the bit on CPUs without AMX; in float32 another kernel rounds differently.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1)
        self.offset = None if bias is None else bias.detach()

    @torch.compiler.disable  # as above
    def forward(self, x: Tensor) -> Tensor:
        """Map (…, inputs) to (…, outputs), in the dtype of the weight."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.offset, "none", [], "")


def linear_class(quantization: str | None, prepack: bool, device: str) -> Any:
    """Class that replaces linear modules, None if both options are off. Errors are those of ``load``."""
    if quantization not in (None, "int8"):
        raise UsageError(f"quantization is int8 or None, not {quantization!r}")
    if quantization and prepack:
        raise UsageError("int8 weights are packed already: leave quantization or prepack out")
    if (quantization or prepack) and torch.device(device).type != "cpu":
        raise UsageError(f"int8 and prepacked weights are for CPUs, not {device!r}")
    if quantization and not _int8_is_exact():
        raise ModelError("quantization='int8' needs a CPU with VNNI or AMX, and a torch with oneDNN: leave it out")
    return Int8Linear if quantization else PackedLinear if prepack else None


def optimize(
    model: PreTrainedModel,
    quantization: str | None = None,
    prepack: bool = False,
    private: dict[str, nn.Module] | None = None,
) -> PreTrainedModel:
    """Make decoding on a CPU faster at any depth, in place, and return the model. Call it before ``attach``.

    Linear modules of the decoder layers, an adapter's ``private`` ones, and the LM head are replaced one by one, so
    that one weight at most is in memory twice. Without options, only the head's 16-bit inputs are made contiguous.
    """
    kind = linear_class(quantization, prepack, str(model.device))
    if kind is not None:
        modules = decoder_layers(model).modules()
        places = [(parent, name) for parent in modules for name, part in parent.named_children() if is_linear(part)]
        for parent, name in places:
            setattr(parent, name, _replacement(getattr(parent, name), kind))
        if private is not None:
            private.update({name: _replacement(module, kind) for name, module in private.items()})
        if is_linear(model.get_output_embeddings()):
            model.set_output_embeddings(_replacement(model.get_output_embeddings(), kind))
        model.requires_grad_(False)
        model.save_pretrained = _refuse_to_save
    if (head := model.get_output_embeddings()) is not None:
        head.register_forward_pre_hook(_contiguous)
    return model


def _replacement(module: Any, kind: Any) -> nn.Module:
    return kind(module.weight.t() if isinstance(module, Conv1D) else module.weight, module.bias)


def _refuse_to_save(*_: Any, **__: Any) -> NoReturn:
    raise ModelError("a model with int8 or prepacked weights cannot be saved: load it without them")


def _contiguous(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copy of 16-bit inputs in memory of their own.

    ``generate`` passes the head a view of the last prompt positions, for which torch's CPU kernels copy the head's
    weight once per sequence. In float32 another kernel would run, whose bits differ from the full model's.
    """
    return tuple(x.contiguous() if isinstance(x, Tensor) and x.element_size() < 4 else x for x in args)


def _product(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Product of (rows, inputs) with a packed weight: float32 (rows, outputs), exact sums times a scale per output."""
    rows = len(x)
    x = nn.functional.pad(x, (0, 0, 0, max(ROWS - rows, 0)))
    return torch.ops.onednn.qlinear_pointwise(
        x, 1.0, ZERO, weight, scale, zero, None, 1.0, 0, torch.float32, "none", [], ""
    )[:rows]


def _int8_is_exact() -> bool:
    """Whether int8 sums are right here: CPUs without VNNI or AMX add pairs of products in 16 bits."""
    most = torch.full((16, 64), 127, dtype=torch.int8)
    inputs = (most.int() + ZERO).to(torch.uint8)
    with suppress(AttributeError, RuntimeError):  # this torch has no such kernel
        weights = [torch.ops.onednn.qlinear_prepack(sign * most, None) for sign in (1, -1)]
        sums = [_product(inputs, weight, torch.ones(16), torch.zeros(16, dtype=torch.int64)) for weight in weights]
        return bool((sums[0] == 127 * 127 * 64).all() and (sums[1] == -127 * 127 * 64).all())
    return False
