"""The reference that skipping is compared with: a stock model without gates or SkipCache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..model.adapter import Adapter
from ..model.config import bind
from ..model.gate import Gates
from ..model.inspect import decoder_layers
from ..schedule import Schedule


@contextmanager
def discarding_skipped(
    model: nn.Module, schedule: Schedule, prompt_length: int, text: Tensor, adapter: Adapter | None = None
) -> Iterator[None]:
    """Replace each layer's output by its input at the positions that the schedule skips, inside the context.

    Every layer still runs on all positions. Attention is causal and each layer runs a prefix of the positions, so the
    replaced outputs do not affect the others.

    Args:
        model: a stock model, without gates.
        schedule: defines the number of positions that each layer runs.
        prompt_length: number of columns of the left-padded prompts.
        text: token ids (rows, positions) of the pass inside the context.
        adapter: what acts in the place of skipped layers.
    """
    counts = bind(schedule, model.config).positions_per_layer(prompt_length, text.shape[1])
    shapes = Gates({})

    def discard(count: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        made = output[0] if isinstance(output, tuple) else output
        axis = shapes.axis(hidden, tuple(text.shape))
        # A model may drop leading positions whose logits are not needed.
        width = hidden.shape[axis]
        kept = max(count - (text.shape[1] - width), 0)
        mixed = torch.cat([made.narrow(axis, 0, kept), hidden.narrow(axis, kept, width - kept)], dim=axis)
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

    def stand_in(index: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        axis = shapes.axis(hidden, tuple(text.shape))
        dropped = text.shape[1] - hidden.shape[axis]
        here = [max(count - dropped, 0) for count in counts]
        filled = adapter.apply_before(index, hidden, axis, here) if adapter else hidden
        return ((filled, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": filled})

    hooks: list[Any] = []
    for index, (layer, count) in enumerate(zip(decoder_layers(model), counts, strict=True)):
        hooks.append(layer.register_forward_pre_hook(partial(stand_in, index), with_kwargs=True))
        hooks.append(layer.register_forward_hook(partial(discard, count), with_kwargs=True))
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()
