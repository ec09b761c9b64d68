"""Collect the hidden states of passes over texts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..core.patch import gate_state
from ..core.stack import decoder_layers
from ..core.text_passes import TextPasses


@contextmanager
def hidden_states(passes: TextPasses, before: Collection[int]) -> Iterator[dict[int, Tensor]]:
    """Return a context within which the newest pass over the texts leaves what layers are given, (batch, R, size).

    A layer that a position skips passes on what the position was given, so each place holds all R positions.

    Args:
        passes: whose model and batch, with R positions of texts.
        before: indices of layers; the number of layers means what the last one returns.
    """
    layers, seen = decoder_layers(passes.model), dict[int, Tensor]()
    rows, width = passes.batch["input_ids"].shape[0], passes.batch["input_ids"].shape[1] - passes.prompt
    state = gate_state(passes.model)

    def keep(index: int, hidden: Tensor) -> None:
        axis = state.axis(hidden, (rows, width))
        hidden = hidden.movedim((axis - 1, axis), (0, 1))[:, -width:]
        seen[index] = hidden.reshape(rows, width, -1)

    def given(index: int) -> Callable[..., None]:
        return lambda module, args, kwargs: keep(index, args[0] if args else kwargs["hidden_states"])

    def returned(module: nn.Module, args: Any, output: Any) -> None:
        keep(len(layers), output[0] if isinstance(output, tuple) else output)

    hooks = [layers[i].register_forward_pre_hook(given(i), with_kwargs=True) for i in before if i < len(layers)]
    if len(layers) in before:
        hooks.append(layers[-1].register_forward_hook(returned))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
