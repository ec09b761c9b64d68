"""Rank layers by how much the loss rises without them, with a greedy search."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..core.schedule import Schedule
from ..core.stack import decoder_layers
from ..errors import FileError
from ..files import has_key, read_json, write
from .loss import loss_by_position

#: Whether a file's bytes are such losses, which may be replaced.
is_losses = has_key("losses_without")


class LayerOrder:
    """Greedy search for a layer order: drop the layer whose removal raises the loss least, then the next, and so on.

    The prompt keeps all layers. Dropping one of ``n`` layers takes ``n - warmup`` passes over the batches, a whole
    search about ``L**2 / 2`` for ``L`` layers.

    Args:
        model: a causal LM, with or without gates.
        batches: from :func:`skipdecode.evaluation.loss.batches_of`.
        warmup: number of bottom layers that are never dropped.
        file: stores every measured loss, so that an interrupted search resumes.
        job: identifies model and data; losses of another job in ``file`` are replaced.
        on_pass: called with the passes done and the passes in all, after each pass of :meth:`down_to`.

    Attributes:
        losses: loss in nats per token by the number of layers left.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batches: Sequence[Mapping[str, Any]],
        warmup: int = 1,
        *,
        file: Path | None = None,
        job: str = "",
        on_pass: Callable[[int, int], object] = lambda done, total: None,
    ) -> None:
        self._model, self._batches, self._warmup = model, batches, warmup
        self._file, self._job, self._on_pass = file, job, on_pass
        self._known = read_losses(file, job) if file is not None else {}
        self._left = list(range(len(decoder_layers(model))))
        self._dropped: list[int] = []
        self.losses = {len(self._left): self._loss(())}

    def down_to(self, depth: int) -> tuple[int, ...]:
        """Drop layers until ``depth`` are left; return these in network order, then the others, last dropped first."""
        done, total = 0, passes(len(self._left), max(depth, 1), self._warmup)
        while len(self._left) > max(depth, self._warmup, 1):
            trials = {}
            for layer in self._left[self._warmup :]:
                trials[layer] = self._loss((*self._dropped, layer))
                done += 1
                self._on_pass(done, total)
            best = min(trials, key=lambda layer: trials[layer])
            self._left.remove(best)
            self._dropped.append(best)
            self.losses[len(self._left)] = trials[best]
        return (*self._left, *reversed(self._dropped))

    def _loss(self, dropped: tuple[int, ...]) -> float:
        """Return the loss without the dropped layers, measured at most once."""
        key = ",".join(map(str, sorted(dropped)))
        if key not in self._known:
            count = len(decoder_layers(self._model))
            order = (*(i for i in range(count) if i not in dropped), *dropped)
            depth = count - len(dropped)
            schedule = Schedule(count, depth, depth, horizon=1, decay="constant", order=order)
            self._known[key] = loss_by_position(self._model, self._batches, schedule)[0]
            if self._file is not None:
                write(self._file, json.dumps({"job": self._job, "losses_without": self._known}) + "\n")
        return self._known[key]


def passes(layers: int, depth: int, warmup: int = 1) -> int:
    """Return the number of passes that a search takes to go from ``layers`` layers down to ``depth``."""
    return sum(n - warmup for n in range(max(depth, warmup, 1) + 1, layers + 1))


def read_losses(file: Path, job: str) -> dict[str, float]:
    """Read the losses of ``job`` by dropped layers; empty if ``file`` is missing, damaged or of another job."""
    try:
        values = read_json(file)
    except (FileError, FileNotFoundError):
        return {}
    losses = values.get("losses_without") if isinstance(values, dict) and values.get("job") == job else None
    if not isinstance(losses, dict):
        return {}
    return {key: loss for key, loss in losses.items() if type(loss) is float and math.isfinite(loss)}
