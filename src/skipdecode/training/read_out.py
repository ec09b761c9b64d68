"""Logits at any layer, for losses of all exits."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModel
from ..model.inspect import decoder_layers

#: Maps hidden states (..., hidden size) to logits (..., vocabulary).
ReadOut = Callable[[Tensor], Tensor]


@torch.no_grad()
def read_out(model: nn.Module) -> ReadOut:
    """Function from hidden states to logits: final norm, projection, LM head.

    A trial pass records the modules that run after the last decoder layer. The model is in evaluation mode.

    Raises UnsupportedModel if they do not yield the model's logits, because it does more, such as soft-capping.
    """
    last = decoder_layers(model)[-1]
    tail: list[nn.Module] = []
    seen: list[Tensor] = []

    def record(module: nn.Module, args: Any, output: Any) -> None:
        if module is last:
            seen.append(output[0] if isinstance(output, tuple) else output)
        elif seen and not any(module.children()):
            tail.append(module)

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_hook(record))
        ids = torch.arange(2, device=next(model.parameters()).device)[None]
        logits = model(input_ids=ids, use_cache=False).logits
    through = nn.Sequential(*tail)
    recomputed = through(seen[0])
    if recomputed.shape != logits.shape or not torch.allclose(recomputed, logits, rtol=1e-4, atol=1e-4):
        raise UnsupportedModel(f"{type(model).__name__} does more than norm and LM head after its last layer")
    return through
