"""Weights laid out once as this CPU's products read them, instead of at every call: layers and LM head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..core.stack import decoder_layers
from ..errors import ModelError, UnsupportedModel
from .linear import DecodingLinear, is_replaced, plain_linear, replace_linear

#: Types of weights that are laid out anew.
DTYPES = (torch.bfloat16, torch.float32)


class PackedLinear(DecodingLinear):
    """A linear module whose weight has the blocked layout of oneDNN's products.

    ``F.linear`` on a CPU brings the weight into that layout at every call. This is what inductor does when it freezes
    a model. In bfloat16 the product is the same, bit for bit, where it was measured; in float32 ``F.linear`` is another
    product, and roundings differ.

    Args:
        weight: (outputs, inputs), bfloat16 or float32, on a CPU.
        bias: (outputs), or None.
    """

    packed_weight: Tensor
    option = "prepack"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        # Which number of rows it is made for, one here, changed nothing that could be measured.
        self.register_buffer("packed_weight", torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1))

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) to (…, outputs), in the type of the weight."""
        self.check_call(x)
        product = _opaque_product if torch.compiler.is_compiling() else _product
        return product(x, self.packed_weight, self.bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


# Inductor compiles oneDNN's products of constant weights only; one that it does not know it calls.
_opaque_product = torch.library.custom_op("skipdecode::packed_linear", _product, mutates_args=())


@_opaque_product.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def check_prepack(name: str, config: Any, dtype: str | torch.dtype, device: str) -> None:
    """Whether the weights of a model of this config may be laid out anew here; before they are read.

    Args:
        name: of the model, for messages.
        config: of the model.
        dtype: of its weights; ``auto`` is the config's.
        device: where it runs.

    Raises:
        ModelError: another device than a CPU, a quantized checkpoint, or a type or a torch without the products.
    """
    if torch.device(device).type != "cpu":
        raise ModelError(f"prepack is for CPUs, not {device!r}: leave it out")
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{name} is quantized: leave prepack out")
    if not torch.backends.mkldnn.is_available():
        raise ModelError("prepack needs a torch that is built with oneDNN (mkldnn): leave it out, or install another")
    kind = config.dtype if dtype == "auto" else getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if kind not in DTYPES:
        raise ModelError(
            f"prepack takes weights of bfloat16 or float32, not {kind}: give one as dtype, or leave it out"
        )
    try:
        PackedLinear(torch.zeros(16, 16, dtype=kind), None)(torch.zeros(1, 16, dtype=kind))
    except (AttributeError, RuntimeError) as error:
        raise ModelError(
            f"torch has no prepacked products of {kind} for this CPU ({error}): leave prepack out"
        ) from None


def prepack(model: PreTrainedModel) -> PreTrainedModel:
    """Lay out the weights of the linear modules of all layers and of the LM head anew, in place. Returns the model.

    One module after the other: at most one weight is held twice. A head that is tied to the embedding gets weights of
    its own, for which memory rises. Modules that are more than linear (subclasses, hooks, computed weights) stay. The
    model can be decoded with, but not saved or trained.

    Raises:
        ModelError: as :func:`check_prepack`.
        UnsupportedModel: there are no linear modules in its layers, or their weights are read past them.
    """
    check_prepack(type(model).__name__, model.config, model.dtype, str(model.device))
    if not is_replaced(model, PackedLinear):
        check_packable(model)
        replace_linear(model, PackedLinear)
    return model


def check_packable(model: PreTrainedModel) -> None:
    """Raises UnsupportedModel where no layer has a linear module to lay out anew. (On the meta device too.)"""
    if not any(plain_linear(decoder_layers(model))):
        raise UnsupportedModel(
            f"{type(model).__name__}'s layers hold their weights elsewhere than in linear modules: leave prepack out"
        )
