"""Ended rows leave their batch: the model computes the others alone, while ``model.generate`` still sees all rows."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ..model.cache import SkipCache, total_kv_bytes

#: Rows leave when at most this share goes on: each time copies the cache, and all copies are then no larger than it.
SHARE = 0.5
#: Inputs of a forward pass with the shape (rows, positions).
BY_ROW = ("input_ids", "attention_mask", "position_ids")


class FinishedRows(ExitStack):
    """A context around ``model.generate`` in which ended rows leave the batch. It changes no token.

    A row that has left gets zero logits, and ``generate`` writes padding for it. All rows stay with a cache of another
    kind, in compiled models, and where the model takes other tensors.

    Args:
        model: the causal LM.
        cache: of this batch.
        ended: which rows have ended (rows,), kept up to date by the caller.

    Attributes:
        peak_kv_bytes: largest size of the cache just before rows left.
    """

    def __init__(self, model: PreTrainedModel, cache: DynamicCache, ended: Tensor) -> None:
        super().__init__()
        self.cache = cache
        self.ended = ended
        self.kept = torch.arange(len(ended), device=ended.device)
        self.peak_kv_bytes = 0
        known = type(cache) in (DynamicCache, SkipCache) and not hasattr(model, "_reorder_cache")
        if known and model._compiled_call_impl is None:
            self.enter_context(model.register_forward_pre_hook(self._before, with_kwargs=True))
            self.enter_context(model.register_forward_hook(self._after))

    def _before(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        tensors = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        if all(name in BY_ROW and value.shape[:-1] == self.ended.shape for name, value in tensors.items()):
            goes_on = ~self.ended[self.kept]
            if 0 < int(goes_on.sum()) <= SHARE * len(self.kept):
                self.peak_kv_bytes = max(self.peak_kv_bytes, total_kv_bytes(self.cache))
                self.cache.reorder_cache(goes_on.nonzero()[:, 0])  # beam search needs it, so every cache layer has it
                self.kept = self.kept[goes_on]
        if len(self.kept) < len(self.ended):
            kwargs = kwargs | {name: value[self.kept.to(value.device)] for name, value in tensors.items()}
        return args, kwargs

    def _after(self, model: nn.Module, args: Any, output: Any) -> Any:
        if len(self.kept) < len(self.ended):
            all_rows = output.logits.new_zeros(len(self.ended), *output.logits.shape[1:])
            output.logits = all_rows.index_copy_(0, self.kept.to(all_rows.device), output.logits)
        return output
