"""Linear modules with prepacked weights, which have the layout that the CPU's kernels read."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ModelError
from .linear import DecodingLinear

#: Weight dtypes that oneDNN packs.
DTYPES = (torch.bfloat16, torch.float32)


class PackedLinear(DecodingLinear):
    """A linear module whose weight has the blocked layout of oneDNN's kernels.

    ``F.linear`` on a CPU converts the weight to that layout at every call; this module does it once, as inductor does
    when it freezes a model. In bfloat16, results were equal bit for bit on CPUs without AMX, and with it but for some
    products of many rows; in float32 they round differently, since ``F.linear`` uses another kernel.

    Args:
        weight: (outputs, inputs), bfloat16 or float32, on a CPU.
        bias: (outputs), or None.
    """

    packed_weight: Tensor
    option = "prepack"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        # The batch size that the layout is made for (1 here) made no measurable difference.
        self.register_buffer("packed_weight", torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1))

    @torch.compiler.disable  # inductor supports this oneDNN kernel for constant weights only
    def forward(self, x: Tensor) -> Tensor:
        """Map (…, inputs) to (…, outputs), in the dtype of the weight."""
        self.check_call(x)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed_weight, self.bias, "none", [], "")

    @classmethod
    def check_products(cls, dtype: torch.dtype) -> None:
        """Raise ModelError if torch has no prepacked kernel for ``dtype`` on this CPU."""
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
