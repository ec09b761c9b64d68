"""Linear modules whose weights are prepacked: kept in the layout that this CPU's products read."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ModelError
from .linear import DecodingLinear

#: Types of weights that oneDNN packs.
DTYPES = (torch.bfloat16, torch.float32)


class PackedLinear(DecodingLinear):
    """A linear module whose weight has the blocked layout of oneDNN's products.

    ``F.linear`` on a CPU brings the weight into that layout at every call; inductor packs it once when it freezes a
    model, and so does this. In bfloat16 the product is the same, bit for bit, where it was measured; in float32
    ``F.linear`` uses another product, and roundings differ.

    Args:
        weight: (outputs, inputs), bfloat16 or float32, on a CPU.
        bias: (outputs), or None.
    """

    packed_weight: Tensor
    option = "prepack"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        # The number of rows that the layout is made for, one here, changed nothing that could be measured.
        self.register_buffer("packed_weight", torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1))

    @torch.compiler.disable  # inductor takes oneDNN's products of constant weights only
    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) to (…, outputs), in the type of the weight."""
        self.check_call(x)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed_weight, self.bias, "none", [], "")

    @classmethod
    def check_products(cls, dtype: torch.dtype) -> None:
        """Raises ModelError where torch has no prepacked products of ``dtype`` for this CPU."""
        if not torch.backends.mkldnn.is_available():
            raise ModelError("prepack needs a torch that is built with oneDNN (mkldnn): leave it out")
        if dtype not in DTYPES:
            raise ModelError(f"prepack takes weights of bfloat16 or float32, not {dtype}: leave it out")
        try:
            cls(torch.zeros(16, 16, dtype=dtype), None)(torch.zeros(1, 16, dtype=dtype))
        except (AttributeError, RuntimeError) as error:
            raise ModelError(
                f"torch has no prepacked products of {dtype} for this CPU ({error}): leave prepack out"
            ) from None
