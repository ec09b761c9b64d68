"""Remove finished sequences ("rows") from a batch: the model computes only the others; ``generate`` still sees all.

A patch around the model's forward removes finished rows from its inputs and the cache, and gives them zero logits, for
which ``generate`` writes padding. Tokens, random numbers, logits processors and lengths are the same as without it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..model.cache import SkipCache, total_kv_bytes
from ..model.cache_name import CACHE
from ..model.gate import Patch, put
from .options import num_beams

#: Remove finished rows when at most this share of the cached rows goes on. Each removal copies the remaining rows; with
#: one half, all copies together are no larger than the first cache.
SHARE = 0.5
#: Inputs of a forward pass with the shape (rows, positions).
BY_ROW = ("input_ids", "attention_mask", "position_ids")


def track_finished_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: DynamicCache,
    rows: int,
    stops: Collection[int],
    strings: Any,
    options: Mapping[str, Any],
) -> FinishedRows | None:
    """Return a tracker that removes finished rows from the batch; None if it cannot, and all rows stay.

    Rows stay with beam search, which reorders them at every step; with the caller's stopping criteria, which may end
    rows that the tracker does not see; without end tokens, since ``generate`` then does not pad ended rows; with a
    baseline's own cache, which may hold data per row; and in compiled models, which may recompile for fewer rows.

    Args:
        rows: number of sequences in the batch; one alone stays.
        stops: token ids that end a text.
        strings: ``stop_strings`` of ``model.generate``.
        options: its other options.
    """
    ours = isinstance(cache, SkipCache) or type(cache) is DynamicCache
    beams = num_beams(options, model.generation_config) > 1 or hasattr(model, "_reorder_cache")
    if rows == 1 or not stops or not ours or beams or options.get("stopping_criteria"):
        return None
    if model._compiled_call_impl is not None:
        return None
    ends: list[StoppingCriteria] = [EosTokenCriteria(sorted(stops))]
    if strings:
        ends.append(StopStringCriteria(tokenizer, strings))
    return FinishedRows(model, cache, rows, ends)


class FinishedRows(StoppingCriteria):
    """A stopping criterion that stops no row: it tracks which rows have ended, and removes them from the batch.

    Pass it to ``model.generate``, and enter it as a context around that call.

    Attributes:
        peak_kv_bytes: the largest size of the cache just before a removal.
    """

    def __init__(
        self, model: PreTrainedModel, cache: DynamicCache, rows: int, ends: Sequence[StoppingCriteria]
    ) -> None:
        self.model = model
        self.cache = cache
        self.ends = StoppingCriteriaList(ends)
        self.ended = torch.zeros(rows, dtype=torch.bool, device=model.device)
        self.kept: Tensor | None = None  # indices of the rows in the cache, once some have left
        self.peak_kv_bytes = 0

    def __enter__(self) -> FinishedRows:
        with _LOCK:  # threads share a model
            put(RowsPatch, self.model, "forward")
        self.cache.finished_rows = self
        return self

    def __exit__(self, *_: object) -> None:
        del self.cache.finished_rows

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Note which rows have ended, and return (rows,) False: no row stops because of this criterion."""
        self.ended |= self.ends(input_ids, scores, **kwargs)
        return torch.zeros_like(self.ended)

    def before(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Remove ended rows if enough have ended, and return arguments of ``forward`` for the rows that are left."""
        given = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        # If a model family takes other tensors, whose rows are unknown, all rows stay.
        if all(name in BY_ROW and value.shape[:-1] == self.ended.shape for name, value in given.items()):
            self._cut()
        if self.kept is None:
            return kwargs
        return kwargs | {name: value[self.kept.to(value.device)] for name, value in given.items()}

    def _cut(self) -> None:
        """Remove ended rows from the cache if at most :data:`SHARE` of its rows, but at least one, go on."""
        kept = torch.arange(len(self.ended), device=self.ended.device) if self.kept is None else self.kept
        goes_on = ~self.ended[kept]
        if 0 < int(goes_on.sum()) <= SHARE * len(kept):
            self.peak_kv_bytes = max(self.peak_kv_bytes, total_kv_bytes(self.cache))
            self.cache.reorder_cache(goes_on.nonzero()[:, 0])  # beam search needs it, so every cache layer has it
            self.kept = kept[goes_on]

    def after(self, output: Any) -> Any:
        """Return the model's output with zero logits inserted for the removed rows."""
        if self.kept is not None:
            all_rows = output.logits.new_zeros(len(self.ended), *output.logits.shape[1:])
            output.logits = all_rows.index_copy_(0, self.kept.to(all_rows.device), output.logits)
        return output


_LOCK = threading.Lock()


class RowsPatch(Patch):
    """Replaces the model's ``forward``: where the cache has a :class:`FinishedRows`, it skips rows that have left."""

    @torch.compiler.disable(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on the rows that go on, and return its output for all rows."""
        rows = getattr(kwargs.get(CACHE), "finished_rows", None)
        if rows is None:
            return self.original(*args, **kwargs)
        return rows.after(self.original(*args, **rows.before(kwargs)))
