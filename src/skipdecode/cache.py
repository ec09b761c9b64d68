"""An ordinary dynamic KV cache that follows a schedule; a layer no later step will use holds nothing."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from .errors import CacheError, ScheduleError
from .schedule import Schedule
from .trained import default


class SkipCache(DynamicCache):
    """Give it to ``model.generate(..., past_key_values=SkipCache(model, schedule))``; one per call.

    Args:
        model: the causal LM, with gates attached (:func:`skipdecode.attach`).
        schedule: which layers each position runs; the one in the model's config if None.

    Raises:
        ScheduleError: the schedule does not fit the model, or there is none.
        CacheError: (while decoding) going deeper again on a cache whose layers were retired.

    Attributes:
        step_depths: layers run by each decode step so far.
        peak_kv_bytes: most bytes of keys and values held at once.
    """

    def __init__(self, model: PreTrainedModel, schedule: Schedule | None = None) -> None:
        super().__init__(config=model.config)
        schedule = schedule or default(model.config)
        if schedule is None:
            raise ScheduleError("no schedule was given and the model's config carries none")
        if schedule.num_layers != len(self.layers):
            raise ScheduleError(f"the schedule is for {schedule.num_layers} layers, the model has {len(self.layers)}")
        chunked = getattr(model.generation_config, "prefill_chunk_size", None)
        if chunked is not None and not schedule.is_full:
            raise CacheError(
                "chunked prefill hides where the prompt ends: set generation_config.prefill_chunk_size to None"
            )
        self.schedule = schedule
        self.step_depths: list[int] = []
        self.peak_kv_bytes = 0
        self._prompt_length = 0
        self._columns: list[int] = []  # per layer, of the pass under way
        self._keep: frozenset[int] = frozenset()  # layers that the next step still runs
        self._alive = 0  # a layer that runs in every step: lengths are read there
        self._kv_bytes = 0

    def begin_prompt(self) -> None:
        """Refused on a cache that has seen its prompt: what follows is one column a pass, each a step."""
        if self._prompt_length and not self.schedule.is_full:
            self._refuse("a prompt, or a chunk of one,")

    def _refuse(self, what: str) -> NoReturn:
        raise CacheError(
            f"{what} came after the prompt, but layers of this cache are retired. A second turn, a reused prefix, "
            "chunked prefill or speculative verification has to start with a new SkipCache and the whole text."
        )

    # --- the pass: the gates ask, in network order, what each layer has to do

    def begin_layer(self, index: int, width: int) -> int:
        """How many of the pass's ``width`` columns layer ``index`` runs (0: pass the hidden states on)."""
        if index == 0:
            self._begin_pass(width)
        return self._columns[index]

    def _begin_pass(self, width: int) -> None:
        schedule = self.schedule
        if self._prompt_length == 0:
            self._prompt_length = width
            self._columns = schedule.columns(width, width)
            self._keep = frozenset(schedule.layers(schedule.depth(0)))
            self._alive = schedule.ranking[0]
            return
        if schedule.is_full:
            self._columns = [width] * len(self.layers)
        elif width != 1:
            self._refuse(f"{width} new positions")
        else:
            running = schedule.layers(schedule.depth(len(self.step_depths)))
            self._columns = [0] * len(self.layers)
            for layer in running:
                self._columns[layer] = 1
            self._keep = frozenset(schedule.layers(schedule.depth(len(self.step_depths) + 1)))
        self.step_depths.append(sum(n > 0 for n in self._columns))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store and return what attention needs; a layer that the next step skips keeps nothing."""
        if not self._columns or self._columns[layer_idx] == 0:
            raise CacheError(
                f"layer {layer_idx} ran though the schedule skips it: call skipdecode.attach(model) on this very model"
            )
        before = self._layer_bytes(layer_idx)
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx not in self._keep:
            self.layers[layer_idx].reset()
        self._kv_bytes += self._layer_bytes(layer_idx) - before
        self.peak_kv_bytes = max(self.peak_kv_bytes, self._kv_bytes)
        return states

    # --- lengths: never read from a layer that holds nothing

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen so far; the same for every layer that still runs."""
        return super().get_seq_length(self._running(layer_idx))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(KV length, offset) of the mask for the layer's kind, full or sliding."""
        return super().get_mask_sizes(query_length, self._running(layer_idx))

    def _running(self, layer_idx: int) -> int:
        """``layer_idx`` if it still runs, else a running layer of its kind, else any running one."""
        if not self._prompt_length or layer_idx in self._keep:
            return layer_idx
        kind = self.is_sliding
        return next((i for i in sorted(self._keep) if kind[i] == kind[layer_idx]), self._alive)

    # --- what cannot be undone

    def activate_past_recording(self) -> None:
        """Refused: assisted decoding rolls the cache back and goes deeper again."""
        if not self.schedule.is_full:
            raise CacheError("assisted (speculative) decoding needs every layer's keys and values: leave SkipCache out")
        super().activate_past_recording()

    @property
    def is_croppable(self) -> bool:
        """Whether ``generate`` may plan to roll a step back."""
        return self.schedule.is_full and super().is_croppable

    def crop(self, tokens_to_remove: int) -> None:
        """Refused once a schedule skips: a rolled-back position would run deeper than its cache."""
        if not self.schedule.is_full:
            raise CacheError("a SkipCache cannot be cropped: retired layers hold nothing to go back to")
        super().crop(tokens_to_remove)

    # --- what it holds

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values held now."""
        return sum(self._layer_bytes(i) for i in range(len(self.layers)))

    def _layer_bytes(self, index: int) -> int:
        keys, values = self.layers[index].keys, self.layers[index].values
        return 0 if keys is None or values is None else keys.nbytes + values.nbytes
