"""Quantizes the LM head to int8 with vLLM's matrix product for int8 layers, which helps at every speed-up.

It changes the logits (equally at every speed-up), so it is off by default.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from ..errors import UnsupportedModel
from ..weights.device import cpu_capabilities

#: Rows of the head that are rounded at once: the whole head in float32 may take more memory than all layers.
ROWS = 8192


class Int8Product:
    """Multiplies hidden states ``(…, width)`` by an int8 LM head, to float32 logits ``(…, vocabulary)``.

    Args:
        weight: (vocabulary, width), floats to quantize with one scale per row; each hidden state gets its own scale.
    """

    def __init__(self, weight: Tensor) -> None:
        self._scale = scale = weight.abs().amax(1).float().clamp_min(1e-12) / 127  # kept alive: it is read in place
        parts = zip(weight.split(ROWS), scale.split(ROWS), strict=True)
        rounded = torch.cat([(rows / of[:, None]).round_().to(torch.int8) for rows, of in parts])
        self._handler = ops.create_onednn_scaled_mm(rounded.t(), scale, torch.float32, True, False, 32)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the logits of ``x``; ``weight``, which vLLM passes, is not read."""
        rows, scale, _ = ops.onednn_scaled_int8_quant(x.reshape(-1, x.shape[-1]))
        logits = x.new_empty((len(rows), self._handler.n), dtype=torch.float32)
        ops.onednn_scaled_mm(self._handler, rows, logits, scale, None, None, None)
        return logits.view(*x.shape[:-1], -1) if bias is None else logits.view(*x.shape[:-1], -1).add_(bias)


def multiplies_int8() -> bool:
    """Return whether this CPU can run an int8 head."""
    return any("vnni" in name or "int8" in name for name, has in cpu_capabilities().items() if has)


def quantize_head(model: nn.Module) -> None:
    """Quantize the LM head of a loaded model to int8. A tied embedding keeps its float weights.

    Raises UnsupportedModel if the model has no LM head of floats, or the CPU does not multiply int8.
    """
    heads: list[Any] = [m for m in model.modules() if isinstance(m, ParallelLMHead)]
    if len(heads) != 1 or not isinstance(heads[0].quant_method, UnquantizedEmbeddingMethod):
        raise UnsupportedModel(f"int8_head: {type(model).__name__} has no LM head of floats; leave it out")
    if not multiplies_int8():
        raise UnsupportedModel("int8_head needs a CPU that multiplies int8 (VNNI or AMX): leave it out")
    heads[0].cpu_linear = Int8Product(heads[0].weight)
