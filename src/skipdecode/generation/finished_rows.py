"""Rows that have ended leave the batch: the model computes the others alone, and ``generate``'s loop goes on over all.

So tokens, random numbers, processors of single rows and lengths are what they were. A patch stands around each pass.
It takes the rows that have ended out of what the model is given, and out of its cache, and puts zeros in the place of
their logits, for which the loop writes padding.
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

from ..core.cache import SkipCache, total_kv_bytes
from ..core.patch import Patch, put
from .options import num_beams

#: Rows leave when at most this share of the rows in the cache goes on. What stays is copied: all cuts together copy no
#: more than the first cache held.
SHARE = 0.5
#: What a pass is given for each row: (rows, positions).
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
    """How the rows of a batch leave; None where they stay.

    They stay with beams, which are put in order at every step; with stopping criteria of the caller, which may end a
    row unnoticed or take the place of others; where no token ends a text, since ``generate`` then goes on writing;
    with a method's own cache, which may know things of its rows; and in compiled layers or models, which other numbers
    of rows may compile anew.

    Args:
        stops: token ids that end a text.
        strings: as ``stop_strings`` of ``model.generate``.
        options: the others.
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
    """Ends no row: notes which have ended. To be given to ``model.generate``, and entered around that call.

    Attributes:
        peak_kv_bytes: most bytes that the cache held when rows left it.
    """

    def __init__(
        self, model: PreTrainedModel, cache: DynamicCache, rows: int, ends: Sequence[StoppingCriteria]
    ) -> None:
        self.model = model
        self.cache = cache
        self.ends = StoppingCriteriaList(ends)
        self.ended = torch.zeros(rows, dtype=torch.bool, device=model.device)
        self.kept: Tensor | None = None  # rows in the cache, once some have left
        self.peak_kv_bytes = 0

    def __enter__(self) -> FinishedRows:
        with _LOCK:  # threads share a model
            put(RowsPatch, self.model, "forward")
        self.cache.finished_rows = self
        return self

    def __exit__(self, *_: object) -> None:
        del self.cache.finished_rows

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """No row (rows,) has to end for this."""
        self.ended |= self.ends(input_ids, scores, **kwargs)
        return torch.zeros_like(self.ended)

    def before(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """What the model is given in place of ``kwargs``."""
        given = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        # A family may be given more than we know of: then its rows stay.
        if all(name in BY_ROW and value.shape[:-1] == self.ended.shape for name, value in given.items()):
            self._cut()
        if self.kept is None:
            return kwargs
        return kwargs | {name: value[self.kept.to(value.device)] for name, value in given.items()}

    def _cut(self) -> None:
        """Let rows leave if enough of them have ended."""
        kept = torch.arange(len(self.ended), device=self.ended.device) if self.kept is None else self.kept
        goes_on = ~self.ended[kept]
        if 0 < int(goes_on.sum()) <= SHARE * len(kept):
            self.peak_kv_bytes = max(self.peak_kv_bytes, total_kv_bytes(self.cache))
            self.cache.reorder_cache(goes_on.nonzero()[:, 0])  # as beams do, so every kind of layer can
            self.kept = kept[goes_on]

    def after(self, output: Any) -> Any:
        """The model's output for all rows again."""
        if self.kept is not None:
            all_rows = output.logits.new_zeros(len(self.ended), *output.logits.shape[1:])
            output.logits = all_rows.index_copy_(0, self.kept.to(all_rows.device), output.logits)
        return output


_LOCK = threading.Lock()


class RowsPatch(Patch):
    """Stands in for the model's ``forward``: passes whose cache has :class:`FinishedRows` go through them."""

    @torch.compiler.disable(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for all rows."""
        rows = getattr(kwargs.get("past_key_values"), "finished_rows", None)
        if rows is None:
            return self.original(*args, **kwargs)
        return rows.after(self.original(*args, **rows.before(kwargs)))
