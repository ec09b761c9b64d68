"""The reference that skipping is compared with. It uses nothing of ours but how many positions each layer runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..core.gate import GateState
from ..core.schedule import Schedule
from ..core.stack import decoder_layers, with_lenders_first


@contextmanager
def undone(model: nn.Module, schedule: Schedule, prompt_length: int, text: Tensor) -> Iterator[None]:
    """The reference: every layer of the stock model runs whole, then gets its input back where it should not have run.

    Nothing is used but how many positions each layer runs: no gate, no cache, no cutting. Layers look back only, so
    that what they did on later positions, undone, cannot be seen.

    Args:
        model: without gates.
        schedule: which layers each position runs.
        prompt_length: width of the prompt block.
        text: the ids (rows, positions) that the pass inside will be over.
    """
    counts = with_lenders_first(schedule, model.config).positions_per_layer(prompt_length, text.shape[1])
    shapes = GateState(frozenset())

    def undo(count: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            hidden, made = args[0] if args else kwargs["hidden_states"], output
            if isinstance(output, tuple):
                made = output[0]
            axis = shapes.axis(hidden, tuple(text.shape))
            # A model may drop positions whose logits nobody asks for.
            width = hidden.shape[axis]
            kept = max(count - (text.shape[1] - width), 0)
            mixed = torch.cat([made.narrow(axis, 0, kept), hidden.narrow(axis, kept, width - kept)], dim=axis)
            return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

        return hook

    hooks = [
        layer.register_forward_hook(undo(count), with_kwargs=True)
        for layer, count in zip(decoder_layers(model), counts, strict=True)
    ]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()
