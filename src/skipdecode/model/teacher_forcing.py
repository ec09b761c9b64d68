"""Run a batch's prompts once, and then its texts with any number of schedules, as training and probing do."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CacheError, ScheduleError
from ..schedule import Schedule
from .attach import teacher_forced
from .cache import SkipCache
from .cache_name import CACHE
from .config import bind, num_layers
from .inspect import gates_of


class PrefilledBatch:
    """A batch whose prompts are computed once, by the full model and without gradients.

    Models with recurrent layers, whose state a pass over several positions cannot always continue, compute them anew
    with each text.

    Args:
        model: a causal LM with gates attached.
        batch: prompts and texts, as :class:`~skipdecode.data.collator.Collator` makes them.
    """

    def __init__(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        self.model: Any = model
        self.batch = batch
        self.prompt: int = batch["prompt_length"]
        self._full = Schedule.full(num_layers(self.model.config))
        self._cache: SkipCache | None = SkipCache(model, self._full)
        with torch.no_grad():
            model(**self._inputs(0, self.prompt), **{CACHE: self._cache}, use_cache=True, logits_to_keep=1)
        try:
            self._cache.begin_text(self._full)
        except CacheError:
            self._cache = None

    @property
    def counted(self) -> Tensor:
        """Mask (batch, R) of the R positions that count: a text's first token, of the prompt's pass, does not."""
        return self.batch["labels"][:, 2:] != -100

    def logits(self, schedule: Schedule | None = None, **options: Any) -> Tensor:
        """Logits (batch, R, vocabulary) of the texts' R positions, each with the layers of its decode step.

        The prompt runs all layers; without a schedule, so does the text. ``options`` are of the model's ``forward``.
        """
        schedule = schedule or self._full
        if schedule.prompt_layers is not None or schedule.prompt_decay:
            raise ScheduleError("the prompt is computed once, by all layers: leave prompt_layers and prompt_decay out")
        width = self.batch["input_ids"].shape[1]
        if self._cache is None:
            options = {"logits_to_keep": width - self.prompt} | options
            with teacher_forced(self.model, schedule, self.prompt):
                return self.model(**self._inputs(0, width), use_cache=False, **options).logits
        adapter = gates_of(self.model).adapter
        cache = deepcopy(self._cache)
        cache.begin_text(bind(schedule, self.model.config, None if adapter is None else adapter.schedules))
        return self.model(**self._inputs(self.prompt, width), **{CACHE: cache}, use_cache=True, **options).logits

    def _inputs(self, start: int, stop: int) -> dict[str, Any]:
        """Inputs of a pass over the positions from ``start`` to ``stop``."""
        return {
            "input_ids": self.batch["input_ids"][:, start:stop],
            "attention_mask": self.batch["attention_mask"][:, :stop],
            "position_ids": self.batch["position_ids"][:, start:stop],
        }
