"""From a layer's hidden states straight to logits: what early exits need, found in any family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.stack import decoder_layers
from ..errors import ModelError

ReadOut = Callable[[Tensor], Tensor]


def read_out(model: nn.Module) -> ReadOut:
    """A function from hidden states (..., hidden size) to logits (..., vocabulary): final norm, projection, LM head.

    The modules are those that a pass calls after its last decoder layer; a trial pass checks that they make its logits.

    Raises:
        ModelError: the model does more than that between its last layer and its logits (soft-capping, say).
    """
    last = decoder_layers(model)[-1]
    tail: list[nn.Module] = []
    seen: list[Tensor] = []

    def layer_done(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    def called(module: nn.Module, args: Any, output: Any) -> None:
        if seen:
            tail.append(module)

    inner = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    leaves = [m for m in model.modules() if id(m) not in inner and not any(m.children())]
    hooks = [leaf.register_forward_hook(called) for leaf in leaves] + [last.register_forward_hook(layer_done)]
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            ids = torch.arange(2, device=next(model.parameters()).device)[None]
            logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
        model.train(training)
    with torch.no_grad():
        recomputed = _through(tail, seen[0])
    if recomputed.shape != logits.shape or not torch.allclose(recomputed, logits, rtol=1e-4, atol=1e-4):
        raise ModelError(
            f"{type(model).__name__} does more than norm and LM head after its last layer: early exits cannot read it"
        )
    return lambda hidden: _through(tail, hidden)


def _through(tail: list[nn.Module], hidden: Tensor) -> Tensor:
    for module in tail:
        hidden = module(hidden)
    return hidden
