"""Closed-form start of an adapter: low-rank bypasses by ridge regression on hidden states."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..model.adapter import Adapter
from ..model.inspect import decoder_layers, gates_of, kv_shared_layers
from ..model.teacher_forcing import PrefilledBatch
from ..schedule import Schedule, SkippedSpan, skipped_spans

#: Ridge penalty, as a share of the mean variance of the hidden states.
RIDGE = 0.01


class Moments:
    """Sums from which the best affine map from ``x`` to ``y`` follows, in float64.

    Args:
        size: number of features of ``x`` and of ``y``.
    """

    def __init__(self, size: int) -> None:
        self.count = 0
        self.x = torch.zeros(size, dtype=torch.float64)
        self.y = torch.zeros(size, dtype=torch.float64)
        self.xx = torch.zeros(size, size, dtype=torch.float64)
        self.xy = torch.zeros(size, size, dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add samples, both (samples, size)."""
        x = x.cpu().double()  # Apple's GPUs have no float64
        y = y.cpu().double()
        self.count += len(x)
        self.x += x.sum(0)
        self.y += y.sum(0)
        self.xx += x.T @ x
        self.xy += x.T @ y

    def solve(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """A (size, rank), B (rank, size) and c (size) of ``y = (x A) B + c``.

        Of all maps of this rank, it has the least squared error with the ridge penalty (reduced-rank regression).
        """
        mean_x = self.x / self.count
        mean_y = self.y / self.count
        xx = self.xx / self.count - torch.outer(mean_x, mean_x)
        xy = self.xy / self.count - torch.outer(mean_x, mean_y)
        xx += RIDGE * xx.diagonal().mean() * torch.eye(len(xx), dtype=torch.float64)
        full = torch.linalg.solve(xx, xy)
        # The directions of ``y`` in which the fitted values vary most.
        _, directions = torch.linalg.eigh(full.T @ xx @ full)
        up = directions[:, -rank:].T
        down = full @ up.T
        return down, up, mean_y - (mean_x @ down) @ up


@torch.no_grad()
def fit_bypasses(adapter: Adapter, batches: Sequence[PrefilledBatch]) -> None:
    """Fit each low-rank bypass to the full model's hidden states behind its skipped span, from the bottom up.

    Args:
        adapter: that of the model that runs the batches.
        batches: texts that the model wrote.
    """
    by_layers: dict[tuple[int, ...], Schedule] = {}
    for schedule in adapter.schedules.values():
        for depth in schedule.distinct_depths:
            by_layers[schedule.layers(depth)] = schedule.flat(depth)
    fitted: set[SkippedSpan] = set()
    for place in range(adapter.num_layers):
        # The span at this place from the bottom, of each set of layers: spans below it are fitted already.
        todo: dict[SkippedSpan, Schedule] = {}
        for layers, schedule in by_layers.items():
            spans = skipped_spans(layers, adapter.num_layers)
            if place < len(spans) and spans[place] not in fitted:
                todo.setdefault(spans[place], schedule)
        for span, moments in _moments(todo, batches, below=place > 0).items():
            bypass: Any = adapter.bypasses[str(span)]
            down, up, bias = moments.solve(bypass.down.shape[1])
            bypass.down.copy_(down)
            bypass.up.copy_(up)
            bypass.bias.copy_(bias)
        fitted |= todo.keys()


def _moments(
    spans: Mapping[SkippedSpan, Schedule], batches: Sequence[PrefilledBatch], below: bool
) -> dict[SkippedSpan, Moments]:
    """Moments of each span's input and of what the full model adds in the span.

    ``below``: the schedules skip layers below the spans too, so that inputs differ from the full model's.
    """
    found: dict[SkippedSpan, Moments] = {}
    for batch in batches if spans else ():
        # Only the last position's logits, unless the model would then leave positions out of layers that share KV.
        few: Any = {} if kv_shared_layers(batch.model.config) else {"logits_to_keep": 1}
        with _hidden_states(batch, {end for span in spans for end in span}) as full:
            batch.logits(**few)
        for span, schedule in spans.items():
            given = full[span.start]
            if below:
                with _hidden_states(batch, {span.start}) as here:
                    batch.logits(schedule, **few)
                given = here[span.start]
            size = given.shape[-1]
            x = given[batch.counted].reshape(-1, size)
            y = (full[span.stop] - given)[batch.counted].reshape(-1, size)
            found.setdefault(span, Moments(size)).add(x, y)
    return found


@contextmanager
def _hidden_states(batch: PrefilledBatch, before: Collection[int]) -> Iterator[dict[int, Tensor]]:
    """Context within which the newest pass over the texts leaves layers' inputs, (batch, R, …, size).

    A layer that a position skips passes its input on, so each entry holds all R positions. Positions of some models
    (Gemma 3n) have several hidden states.

    Args:
        batch: whose model and texts of R positions.
        before: indices of layers; the number of layers stands for the last one's output.
    """
    layers = decoder_layers(batch.model)
    width = batch.batch["input_ids"].shape[1] - batch.prompt
    axis = gates_of(batch.model).axis
    seen: dict[int, Tensor] = {}

    def keep(index: int, hidden: Tensor) -> None:
        seen[index] = hidden.movedim((axis - 1, axis), (0, 1))[:, -width:]

    def before_layer(index: int) -> Any:
        return lambda module, args, kwargs: keep(index, args[0] if args else kwargs["hidden_states"])

    def after_last(module: nn.Module, args: Any, output: Any) -> None:
        keep(len(layers), output[0] if isinstance(output, tuple) else output)

    hooks = [layers[i].register_forward_pre_hook(before_layer(i), with_kwargs=True) for i in before if i < len(layers)]
    if len(layers) in before:
        hooks.append(layers[-1].register_forward_hook(after_last))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
