"""An adapter's matrices as linear layers of vLLM: it packs their weights for a CPU, and chooses a device's kernels."""

from typing import Any

import torch
from torch import Tensor, nn

from ..model.adapter import Adapter, LowRank


@torch.no_grad()
def pack(adapter: Adapter) -> None:
    """Let vLLM multiply by the matrices of bypasses and bottlenecks. Its configuration is set, as while it loads."""
    for module in adapter.modules():
        if isinstance(module, LowRank):
            _pack(module)


def _pack(module: Any) -> None:
    down, up = _linear(module.down), _linear(module.up)
    module.reduce = down
    module.expand = lambda low, other: other + up(low)


def _linear(matrix: Tensor) -> Any:
    """Product of hidden states with a matrix, (inputs, outputs)."""
    from vllm.model_executor.layers.linear import ReplicatedLinear

    made: Any = ReplicatedLinear(*matrix.shape, bias=False, params_dtype=matrix.dtype, return_bias=False)
    made.weight = nn.Parameter(matrix.T.contiguous(), requires_grad=False)
    made.to(matrix.device).quant_method.process_weights_after_loading(made)
    return made.forward
