"""A cache as it is after a prompt, without the prompt's work: a step takes as long whatever the keys and values are."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..core.cache import SkipCache
from ..core.schedule import Schedule


class FilledCache(SkipCache):
    """Holds the keys and values of one position in place of a whole prompt's; ``generate`` goes on with step 0.

    Args:
        model: the causal LM, with gates attached.
        schedule: of the steps.
        ids: one token id for each row (rows, 1).
        length: positions to hold, at least 1.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, schedule: Schedule, ids: Tensor, length: int) -> None:
        super().__init__(model, schedule)
        model(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=self, use_cache=True)
        for index, layer in enumerate(self.layers):
            if length > 1 and self._attends(index) and layer.is_initialized:
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()  # their room was one position's
                layer.update(*(x.expand(-1, -1, length - 1, -1) for x in (layer.keys, layer.values)))
            assert not isinstance(layer, DynamicLayer) or layer.get_seq_length() in (0, length)
        self._length = length

    def begin_prompt(self) -> None:
        """The prompt is there: what ``generate`` takes for its last position is the first step."""
