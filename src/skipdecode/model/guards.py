"""Patches of a model's entry points: they announce prompts, check that passes carry their cache, and provide caches."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from ..errors import CacheError, UsageError
from ..schedule import Schedule
from .cache import SkipCache
from .cache_name import CACHE, CACHE_NAMES
from .gate import Gates, find_cache, refuse_packed
from .patch import Patch


class PassGuard(Patch):
    """Replacement of the model's ``forward`` that raises CacheError if a pass loses its SkipCache or never uses it."""

    gates: Gates

    @torch.compiler.disable(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a pass and return its output. Raises CacheError if the SkipCache was lost, unused or cut short."""
        cache = find_cache(args, kwargs)
        caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
        expected, ids = self.gates.expected.pop(threading.get_ident(), (lambda: None, None))
        # A pass over other ids is not the prepared one, which never came.
        lost = expected() is not None and caches != [expected()]
        if lost and any(value is ids for value in (*args, *kwargs.values())):
            raise CacheError(
                "the SkipCache was dropped on the way to the model, or another put beside it (PEFT's prompt learning "
                "does so): merge the adapter or leave SkipCache out"
            )
        if (guide := self.gates.forced_pass() if cache is None else cache) is not None:
            guide.shape = _shape(args, kwargs)
            if guide.shape is not None and guide.shape[1] > 1:
                refuse_packed(kwargs)  # here too, as some models do not give position ids to layers
        if cache is None:
            return self.original(*args, **kwargs if guide is None else {"use_cache": False} | kwargs)
        if cache.cut_short:
            raise CacheError("a pass over this SkipCache was cut short, so its layers differ: make a new one")
        passes = cache.passes
        try:
            output = self.original(*args, **kwargs)
        except BaseException:
            cache.cut_short = cache.passes > passes
            raise
        if cache.passes == passes:
            raise CacheError(
                "no layer was given the SkipCache, so none was skipped (gradient checkpointing in training mode drops "
                "caches: call model.eval(); else this model does not work with SkipDecode)"
            )
        return output


class PromptGuard(Patch):
    """Replacement of ``prepare_inputs_for_generation``, the only method told that a pass belongs to a prompt."""

    gates: Gates

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a pass's inputs, and tell the SkipCache if they are a prompt. Raises CacheError if it takes none."""
        cache = find_cache(args, kwargs)
        if cache is None:
            return self.original(*args, **kwargs)
        if kwargs.get("use_cache") is False:
            raise CacheError(
                "with use_cache=False every step runs the whole text anew: leave it out, or the SkipCache (detach)"
            )
        # ``generate`` gives a decode step its length, 1. (Before 5.23, it gives a chunk of a prompt neither argument.)
        new = kwargs.get("next_sequence_length")
        if kwargs.get("is_first_iteration") or new is None:
            cache.begin_prompt()
            if new is not None and new < 1:
                raise CacheError("the cache holds the whole prompt: leave at least its last token out of a prefix")
        inputs = self.original(*args, **kwargs)
        ids = inputs.get("inputs_embeds") if inputs.get("input_ids") is None else inputs["input_ids"]
        self.gates.expected[threading.get_ident()] = weakref.ref(cache), ids
        return inputs


class CacheProvider(Patch):
    """Replacement of ``generate`` that gives a new SkipCache to a call without a cache."""

    schedule: Schedule

    def __init__(self, model: nn.Module, name: str, owner: nn.Module) -> None:
        super().__init__(model, name)
        self.model = owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``generate``, with a new SkipCache if no cache is given, and return its result."""
        return self.original(*args, **with_cache(self.model, self.schedule, args, kwargs))


def with_cache(model: nn.Module, schedule: Schedule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a call of ``generate``, with a new SkipCache if they name no cache."""
    if any(kwargs.get(name) is not None for name in CACHE_NAMES):
        return kwargs
    # Unset the cache kind that a generation config names: it is for calls without a cache. (transformers drops
    # "hybrid" itself, and warns of any option passed along with a generation_config.)
    configs = (*args[1:2], kwargs.get("generation_config"), getattr(model, "generation_config", None))
    if {getattr(config, "cache_implementation", None) for config in configs} - {None, "hybrid"}:
        kwargs = {"cache_implementation": None} | kwargs
    return kwargs | {CACHE: SkipCache(model, schedule)}


class BatchingGuard(Patch):
    """Replacement of ``init_continuous_batching``, which all entry points of transformers' continuous batching call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise UsageError: continuous batching mixes positions, in a cache of its own that follows no schedule."""
        raise UsageError(
            "transformers' continuous batching (generate_batch, transformers serve) cannot follow the schedule that "
            "attach was given: use model.generate or `skipdecode serve`; detach(model) for full depth"
        )


def _shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """Return (batch, positions) of a pass's ids or embeddings; None if it has neither."""
    given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1])
    return next((tuple(value.shape[:2]) for value in given if isinstance(value, Tensor)), None)
