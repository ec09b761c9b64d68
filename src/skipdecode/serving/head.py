"""Replaces the LM head's weights by int8, with the products that vLLM has for int8 layers. All speeds get quicker.

Logits change, alike for all speeds, so it is off unless asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from ..errors import UnsupportedModel
from ..weights.device import cpu_capabilities

#: Rows of the head that are rounded at once: in float32 it may be larger than all layers.
ROWS = 8192


class Int8Product:
    """Replaces the product that vLLM made for a head: ``(rows, width)`` to ``(rows, vocabulary)``, in float32.

    Args:
        weight: (vocabulary, width), of floats; one scale per row of it, and one per row of what it is given.
    """

    def __init__(self, weight: Tensor) -> None:
        self._scale = scale = weight.abs().amax(1).float().clamp_min(1e-12) / 127  # the product reads it where it is
        parts = zip(weight.split(ROWS), scale.split(ROWS), strict=True)
        rounded = torch.cat([(rows / of[:, None]).round_().to(torch.int8) for rows, of in parts])
        self._handler = ops.create_onednn_scaled_mm(rounded.t(), scale, torch.float32, True, False, 32)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Logits; the weights that vLLM hands over are not read."""
        rows, scale, _ = ops.onednn_scaled_int8_quant(x.reshape(-1, x.shape[-1]))
        logits = x.new_empty((len(rows), self._handler.n), dtype=torch.float32)
        ops.onednn_scaled_mm(self._handler, rows, logits, scale, None, None, None)
        return logits.view(*x.shape[:-1], -1) if bias is None else logits.view(*x.shape[:-1], -1).add_(bias)


def why_no_int8() -> str:
    """Why this CPU has no int8 head; nothing where it has one."""
    multiplies = any("vnni" in name or "int8" in name for name, has in cpu_capabilities().items() if has)
    return "" if multiplies else "int8_head needs a CPU that multiplies int8 (VNNI or AMX): leave it out"


def quantize_head(model: nn.Module) -> None:
    """Give a loaded model's LM head int8 weights. An embedding that is tied to it keeps its own.

    Raises:
        UnsupportedModel: there is no head of floats here, or the CPU does not multiply int8.
    """
    heads: list[Any] = [m for m in model.modules() if isinstance(m, ParallelLMHead)]
    if len(heads) != 1 or not isinstance(heads[0].quant_method, UnquantizedEmbeddingMethod):
        raise UnsupportedModel(f"int8_head: {type(model).__name__} has no LM head of floats; leave it out")
    if reason := why_no_int8():
        raise UnsupportedModel(reason)
    heads[0].cpu_linear = Int8Product(heads[0].weight)
