"""Keep the prompt of a conversation between its turns: a turn computes only what the last one's prompt did not hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..model.attach import attach
from ..model.cache import RECURRENT, SkipCache
from ..model.cache_name import CACHE
from ..schedule import Schedule


class KeptPrompt:
    """The keys and values of one prompt, which all layers have run, for prompts that begin as it did.

    Where they cannot be used, everything is computed anew: layers with recurrent states, schedules that skip layers in
    the prompt, a prompt that begins otherwise while layers hold only a sliding window.

    Args:
        model: a transformers causal LM. Its adapter, if it has one, does not act in prompts.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = attach(model)
        self.clear()

    def clear(self) -> None:
        """Forget the prompt, and free its memory."""
        self._ids: list[int] = []
        self._cache = DynamicCache(config=self.model.config)

    def cache(self, ids: Sequence[int], schedule: Schedule) -> SkipCache:
        """Return a cache for one call of ``generate`` on the prompt ``ids``, which is kept for the next call.

        ``generate`` is given the whole prompt; it computes what the cache does not hold, the last token at least.
        """
        width = len(ids) - 1
        prompt_is_whole = min(schedule.positions_per_layer(width, width), default=0) == width
        if not width or not prompt_is_whole or any(isinstance(layer, RECURRENT) for layer in self._cache.layers):
            return SkipCache(self.model, schedule)
        self._keep(list(ids[:-1]))
        return SkipCache(self.model, schedule, prefix=self._cache)

    @torch.no_grad()
    def _keep(self, ids: list[int]) -> None:
        same = next((i for i, (a, b) in enumerate(zip(self._ids, ids, strict=False)) if a != b), None)
        same = min(len(self._ids), len(ids)) if same is None else same
        if same < len(self._ids):
            if all(type(layer) is DynamicLayer for layer in self._cache.layers):
                for layer in self._cache.layers:
                    layer.keys, layer.values = layer.keys[..., :same, :], layer.values[..., :same, :]
            else:
                self.clear()
                same = 0
        self._ids = ids[:same]
        if same < len(ids):
            new = torch.tensor([ids[same:]], device=self.model.device)
            try:
                self.model(input_ids=new, **{CACHE: self._cache}, use_cache=True, logits_to_keep=1)
            except BaseException:  # Ctrl-C too: some layers have seen the new positions, others have not
                self.clear()
                raise
            self._ids = ids
