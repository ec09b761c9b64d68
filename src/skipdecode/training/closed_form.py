"""Find an adapter's stand-ins in closed form: ridge regression on the hidden states of passes that skip layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.adapter import Adapter, Gap, StandIn, gaps_between
from ..core.attach import teacher_forced
from ..core.schedule import Schedule
from ..core.stack import decoder_layers

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
        x, y = x.double().cpu(), y.double().cpu()
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
def fit_stand_ins(model: nn.Module, adapter: Adapter, batches: Sequence[Mapping[str, Any]]) -> None:
    """Fit each stand-in to the full model's hidden states after its gap, from the bottom up.

    Args:
        model: with gates and ``adapter`` attached.
        batches: as :class:`~skipdecode.data.collation.Collator` makes them.
    """
    count = len(decoder_layers(model))
    fitted: set[Gap] = set()
    for schedule in adapter.schedules.values():
        for depth in schedule.distinct_depths:
            flat = schedule.replace(
                max_depth=depth, min_depth=depth, horizon=1, decay="constant", depths=None, prompt_layers=None,
                prompt_decay=0,
            )  # fmt: skip
            for gap in gaps_between(flat.layers(depth), count):
                if gap not in fitted:
                    stand_in: Any = adapter.stand_ins[str(gap)]
                    _fit(model, stand_in, gap, flat, batches)
                    fitted.add(gap)


def _fit(model: nn.Module, stand_in: StandIn, gap: Gap, flat: Schedule, batches: Sequence[Mapping[str, Any]]) -> None:
    moments = Moments(len(stand_in.bias))
    full = Schedule.full(flat.num_layers)
    for batch in batches:
        wanted = _scored(batch)
        before = hidden_states(model, batch, flat, gap.start)[wanted]
        moments.add(before, hidden_states(model, batch, full, gap.stop)[wanted] - before)
    for parameter, value in zip(
        (stand_in.down, stand_in.up, stand_in.bias), moments.solve(stand_in.down.shape[1]), strict=True
    ):
        parameter.copy_(value)


def _scored(batch: Mapping[str, Any]) -> Tensor:
    """Return which positions of ``batch`` are decode steps of the response: (batch, positions), bool."""
    scored = torch.zeros_like(batch["attention_mask"], dtype=torch.bool)
    scored[:, batch["prompt_length"] :] = batch["labels"][:, 2:] != -100
    return scored


def hidden_states(model: nn.Module, batch: Mapping[str, Any], schedule: Schedule, layer: int) -> Tensor:
    """Return the hidden states (batch, positions, size) before layer ``layer``, or after the last one."""
    layers, seen = decoder_layers(model), []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    def after(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    if layer < len(layers):
        hook = layers[layer].register_forward_pre_hook(before, with_kwargs=True)
    else:
        hook = layers[-1].register_forward_hook(after)
    try:
        with teacher_forced(model, schedule, batch["prompt_length"]):
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
            model(**inputs, logits_to_keep=1, use_cache=False)
    finally:
        hook.remove()
    return seen[0]
