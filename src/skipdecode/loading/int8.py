"""Linear modules with int8 weights and dynamically quantized int8 activations (W8A8), for decoding on CPUs."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor, nn

from ..errors import ModelError
from .linear import DecodingLinear

#: The zero point of inputs: oneDNN's fast kernels take unsigned ones.
ZERO = 128
#: Inputs are padded to four rows: oneDNN multiplies one row more slowly, since it has too few sums to add to at once.
ROWS = 4


class Int8Linear(DecodingLinear):
    """An int8 linear module with a scale per output, and a scale per row of its input that each call computes.

    oneDNN multiplies int8 by int8 into exact int32 sums, with weights in its own layout. (On CPUs, torchao 0.18
    converts both to int32 or float32 first, which is slower than float weights.)

    Args:
        weight: (outputs, inputs).
        bias: (outputs), or None.
    """

    int8_weight: Tensor
    int8_scale: Tensor
    int8_zero: Tensor
    option = "quantization='int8'"
    least_share = 0.9

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
        self.check_call(x)
        rows = x.reshape(-1, self.in_features)
        scale = rows.abs().amax(1, keepdim=True).float().clamp_min_(1e-12).div_(127)
        rounded = (rows / scale).round_().add_(ZERO).to(torch.uint8)
        y = _product(rounded, self.int8_weight, self.int8_scale, self.int8_zero)
        y = y.mul_(scale) if self.bias is None else torch.addcmul(self.bias, y, scale)
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    @classmethod
    def check_products(cls, dtype: torch.dtype) -> None:
        """Raise ModelError if int8 products overflow: CPUs without VNNI or AMX add pairs of them in 16 bits."""
        if not _sums_are_exact():
            raise ModelError(
                "quantization='int8' needs a CPU with exact int8 products (VNNI or AMX) and a torch that uses them, "
                f"which {torch.__version__} does not here: leave it out"
            )


def _product(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Multiply (rows, inputs) by the weight into float32 (rows, outputs): exact int32 sums times a scale per output."""
    rows = len(x)
    if rows < ROWS:
        x = nn.functional.pad(x, (0, 0, 0, ROWS - rows))
    y = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, ZERO, weight, scale, zero, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y[:rows]


def _sums_are_exact() -> bool:
    """Return whether torch has the kernel, and its sums are right where they would overflow 16 bits."""
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
