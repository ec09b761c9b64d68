"""Find an adapter's stand-ins in closed form: ridge regression on the hidden states of passes that skip layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..model.adapter import Adapter, SkippedSpan, skipped_spans
from ..model.inspect import decoder_layers, gates_of, kv_shared_layers
from ..model.teacher_forcing import PrefilledBatch
from ..schedule import Schedule

#: Ridge penalty, as a share of the mean variance of the hidden states.
RIDGE = 0.01


class Moments:
    """Sums from which the best affine map from ``x`` to ``y`` follows, in float64.

    Args:
        size: number of features of ``x`` and of ``y``.
    """

    def __init__(self, size: int) -> None:
        self.count = 0
        self.x, self.y = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
        self.xx, self.xy = (torch.zeros(size, size, dtype=torch.float64) for _ in range(2))

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add samples, both (samples, size)."""
        x, y = x.cpu().double(), y.cpu().double()  # Apple's GPUs have no float64
        self.count += len(x)
        self.x += x.sum(0)
        self.y += y.sum(0)
        self.xx += x.T @ x
        self.xy += x.T @ y

    def solve(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return A (size, rank), B (rank, size) and c (size) of ``y = (x A) B + c``.

        Of all maps of this rank, it has the least squared error with the ridge penalty (reduced-rank regression).
        """
        mean_x, mean_y = self.x / self.count, self.y / self.count
        xx = self.xx / self.count - torch.outer(mean_x, mean_x)
        xy = self.xy / self.count - torch.outer(mean_x, mean_y)
        xx += RIDGE * xx.diagonal().mean() * torch.eye(len(xx), dtype=torch.float64)
        full = torch.linalg.solve(xx, xy)
        # The directions of ``y`` that the fitted values vary most in.
        _, directions = torch.linalg.eigh(full.T @ xx @ full)
        up = directions[:, -rank:].T
        down = full @ up.T
        return down, up, mean_y - (mean_x @ down) @ up


@torch.no_grad()
def fit_stand_ins(adapter: Adapter, passes: Sequence[PrefilledBatch]) -> None:
    """Fit each stand-in to the full model's hidden states after its gap, a depth's gaps from the bottom up.

    Args:
        adapter: that of the model that makes the passes.
        passes: over texts that the model wrote.
    """
    schedules = adapter.schedules.values()
    flat = {each.layers(depth): each.flat(depth) for each in schedules for depth in each.distinct_depths}
    fitted: set[SkippedSpan] = set()
    for place in range(max(each.num_layers for each in schedules)):
        # The gap at this place from the bottom, of each depth: what lies below it is fitted already.
        todo: dict[SkippedSpan, Schedule] = {}
        for layers, schedule in flat.items():
            gaps = skipped_spans(layers, schedule.num_layers)
            if place < len(gaps) and gaps[place] not in fitted:
                todo.setdefault(gaps[place], schedule)
        for gap, moments in _moments(todo, passes, below=place > 0).items():
            stand_in: Any = adapter.bypasses[str(gap)]
            values = moments.solve(stand_in.down.shape[1])
            for parameter, value in zip((stand_in.down, stand_in.up, stand_in.bias), values, strict=True):
                parameter.copy_(value)
        fitted |= {*todo}


def _moments(
    gaps: Mapping[SkippedSpan, Schedule], passes: Sequence[PrefilledBatch], below: bool
) -> dict[SkippedSpan, Moments]:
    """Return the moments of what each gap is given and what full depth adds there.

    ``below`` tells that the gap's schedule skips layers below it: what it is given is not what full depth is given.
    """
    found: dict[SkippedSpan, Moments] = {}
    for each in passes if gaps else ():
        # Only the last position's logits, unless the model would then leave positions out of layers that borrow keys.
        few: Any = {} if kv_shared_layers(each.model.config) else {"logits_to_keep": 1}
        with _hidden_states(each, {end for gap in gaps for end in gap}) as full:
            each.logits(**few)
        for gap, schedule in gaps.items():
            given = full[gap.start]
            if below:
                with _hidden_states(each, {gap.start}) as here:
                    each.logits(schedule, **few)
                given = here[gap.start]
            size = given.shape[-1]
            x, y = (states[each.counted].reshape(-1, size) for states in (given, full[gap.stop] - given))
            found.setdefault(gap, Moments(size)).add(x, y)
    return found


@contextmanager
def _hidden_states(passes: PrefilledBatch, before: Collection[int]) -> Iterator[dict[int, Tensor]]:
    """Return a context within which the newest pass over the texts leaves what layers are given, (batch, R, …, size).

    A layer that a position skips passes on what the position was given, so each place holds all R positions. A position
    of some models (Gemma 3n) has several hidden states.

    Args:
        passes: whose model and batch, with R positions of texts.
        before: indices of layers; the number of layers means what the last one returns.
    """
    layers, seen = decoder_layers(passes.model), dict[int, Tensor]()
    rows, width = passes.batch["input_ids"].shape[0], passes.batch["input_ids"].shape[1] - passes.prompt
    state = gates_of(passes.model)

    def keep(index: int, hidden: Tensor) -> None:
        axis = state.axis(hidden, (rows, width))
        seen[index] = hidden.movedim((axis - 1, axis), (0, 1))[:, -width:]

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
