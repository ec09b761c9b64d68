"""Closed-form start of an adapter: low-rank bypasses by ridge regression on hidden states."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..model.adapter import Adapter
from ..model.inspect import decoder_layers, gates_of, kv_shared_layers
from ..model.teacher_forcing import PrefilledBatch
from ..schedule import Schedule, SkippedSpan, skipped_spans

#: Ridge penalty, as a share of the mean variance of the hidden states.
RIDGE = 0.01


def moments(x: Tensor, y: Tensor) -> Tensor:
    """Sums of (x, 1) times (x, y, 1) over samples, both (samples, size), in float64."""
    x, y = x.cpu().double(), y.cpu().double()  # Apple's GPUs have no float64
    one = x.new_ones(len(x), 1)
    return torch.cat([x, one], 1).T @ torch.cat([x, y, one], 1)


def best_map(sums: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """A (size, rank), B (rank, size) and c (size) of ``y = (x A) B + c``, from the :func:`moments` of all samples.

    Of all maps of this rank, it has the least squared error with the ridge penalty (reduced-rank regression).
    """
    means = sums / sums[-1, -1]
    size = len(means) - 1
    mean_x, mean_y = means[-1, :-1].split(size)
    xx, xy = means[:-1, :-1].split(size, 1)
    xx = xx - torch.outer(mean_x, mean_x)
    xy = xy - torch.outer(mean_x, mean_y)
    xx += RIDGE * xx.diagonal().mean() * torch.eye(size, dtype=torch.float64)
    full = torch.linalg.solve(xx, xy)
    # The directions of ``y`` in which the fitted values vary most.
    _, directions = torch.linalg.eigh(full.T @ xx @ full)
    up = directions[:, -rank:].T
    down = full @ up.T
    return down, up, mean_y - (mean_x @ down) @ up


@torch.no_grad()
def fit_bypasses(adapter: Adapter, batches: Sequence[PrefilledBatch], known: Collection[str] = ()) -> None:
    """Fit each low-rank bypass to the full model's hidden states behind its skipped span, from the bottom up.

    The model of the adapter wrote the texts of ``batches``. Bypasses that are named in ``known`` stay as they are.
    """
    schedules = [schedule.flat(depth) for schedule in adapter.schedules.values() for depth in schedule.distinct_depths]
    spans = [skipped_spans(schedule.layers(schedule.max_depth), adapter.num_layers) for schedule in schedules]
    fitted = {span for own in spans for span in own if str(span) in known}
    for place in range(max(map(len, spans))):
        # The span at this place from the bottom, of each schedule: spans below it are fitted already.
        todo: dict[SkippedSpan, Schedule] = {}
        for schedule, own in zip(schedules, spans, strict=True):
            if place < len(own) and own[place] not in fitted:
                todo.setdefault(own[place], schedule)
        for span, sums in _moments(todo, batches, below=place > 0).items():
            bypass: Any = adapter.bypasses[str(span)]
            down, up, bias = best_map(sums, bypass.down.shape[1])
            bypass.down.copy_(down)
            bypass.up.copy_(up)
            bypass.bias.copy_(bias)
        fitted |= todo.keys()


def _moments(
    spans: Mapping[SkippedSpan, Schedule], batches: Sequence[PrefilledBatch], below: bool
) -> dict[SkippedSpan, Any]:
    """:func:`moments` of each span's input and of what the full model adds in the span.

    ``below``: the schedules skip layers below the spans too, so that inputs differ from the full model's.
    """
    found: dict[SkippedSpan, Any] = {}
    for batch in batches if spans else ():
        full = _hidden_states(batch, None, {end for span in spans for end in span})
        for span, schedule in spans.items():
            given = _hidden_states(batch, schedule, {span.start})[span.start] if below else full[span.start]
            x, y = (states[batch.counted].flatten(0, -2) for states in (given, full[span.stop] - given))
            found[span] = found.get(span, 0) + moments(x, y)
    return found


def _hidden_states(batch: PrefilledBatch, schedule: Schedule | None, before: set[int]) -> dict[int, Tensor]:
    """Inputs (batch, R, …, size) of the layers ``before`` in a pass over the texts; L stands for the last one's output.

    Without a schedule, the full model runs. A layer that a position skips passes its input on, so each entry holds
    all R positions. Positions of some models (Gemma 3n) have several hidden states.
    """
    layers = decoder_layers(batch.model)
    width = batch.batch["input_ids"].shape[1] - batch.prompt
    axis = gates_of(batch.model).axis
    seen: dict[int, Tensor] = {}

    def before_layer(index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        seen[index] = args[0] if args else kwargs["hidden_states"]

    def after_last(module: nn.Module, args: Any, output: Any) -> None:
        seen[len(layers)] = output[0] if isinstance(output, tuple) else output

    # Only the last position's logits, unless the model would then leave positions out of layers that share KV.
    few: Any = {} if kv_shared_layers(batch.model.config) else {"logits_to_keep": 1}
    with ExitStack() as hooks:
        hooks.enter_context(layers[-1].register_forward_hook(after_last))
        for index in before - {len(layers)}:
            hook = partial(before_layer, index)
            hooks.enter_context(layers[index].register_forward_pre_hook(hook, with_kwargs=True))
        batch.logits(schedule, **few)
    return {index: hidden.movedim((axis - 1, axis), (0, 1))[:, -width:] for index, hidden in seen.items()}
