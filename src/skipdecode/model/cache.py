"""A dynamic cache that follows a schedule. It retires a layer (frees its memory) once no later step runs the layer."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import DynamicLayer

from ..errors import CacheError, UnsupportedModel
from ..schedule import Schedule, choose_schedule
from .config import bind, num_layers, trained_schedules, warn_untrained
from .inspect import gates_of, kv_shared_layers

#: Class of layers that store nothing: they have no attention or use another layer's keys. () in older releases.
STATELESS: Any = getattr(cache_utils, "DummyLayer", ())
#: Class of layers that store the state of a recurrence or a convolution, with or without keys.
RECURRENT: Any = cache_utils.LinearAttentionCacheLayerMixin
#: Spare positions that a full layer allocates. It copies earlier positions once in so many steps.
BLOCK_SIZE = 32


class PreallocatedLayer(DynamicLayer):
    """A DynamicLayer whose step writes its position into spare room instead of copying all earlier ones.

    ``keys`` and ``values`` (batch, heads, positions, size) are the filled part of two larger tensors, which beam search
    and cropping free. With gradients, which forbid writing in place, each update concatenates instead.
    """

    keys: Tensor
    values: Tensor
    _allocated: tuple[Tensor, Tensor] | None = None  # for keys and values

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "keys":
            self._allocated = None
        super().__setattr__(name, value)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new positions, and return those of all positions."""
        if key_states.requires_grad or value_states.requires_grad:
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        allocated = self._allocated
        if allocated is None or allocated[0].shape[-2] < end:
            allocated = _enlarged(self.keys, key_states, start), _enlarged(self.values, value_states, start)
        for whole, states in zip(allocated, (key_states, value_states), strict=True):
            whole[..., start:end, :] = states
        self.keys, self.values = (whole[..., :end, :] for whole in allocated)
        self._allocated = allocated
        return self.keys, self.values


def _enlarged(held: Tensor, states: Tensor, start: int) -> Tensor:
    rows = held.shape[:-2] if start else states.shape[:-2]  # a prefix of fewer rows must not spread over all
    whole = states.new_empty((*rows, start + states.shape[-2] + BLOCK_SIZE, states.shape[-1]))
    if start:
        whole[..., :start, :] = held
    return whole


class RetiredLayer(DynamicLayer):
    """An empty attention layer in the place of a freed one, so that transformers sizes masks by a layer that runs."""


class SkipCache(DynamicCache):
    """The cache of one call ``model.generate(..., cache=SkipCache(model, schedule))``, which skips layers.

    Args:
        model: the causal LM, with gates attached (:func:`skipdecode.attach`).
        schedule: which layers each position runs. None: the slowest speed above 1 that the adapter or model was trained
            for, as :func:`~skipdecode.schedule.choose_schedule` finds it.
        prefix: a cache of the prompts' first positions, for the same rows, which all layers of this model have run. It
            is not changed, and may begin many calls, at any speed.

    Raises:
        ScheduleError: the schedule does not fit the model or its adapter.
        CacheError: the model has no gates or prefills in chunks; the prefix is not what a prompt of this schedule would
            hold; while decoding, a pass needs a retired layer.

    Attributes:
        schedule: the given one, bound to the model.
        step_depths: number of layers that each decode step so far ran.
        peak_kv_bytes: most bytes of keys, values and recurrent states held at once, counted before layers are retired.
        passes: number of forward passes that used this cache.
    """

    def __init__(
        self, model: nn.Module, schedule: Schedule | None = None, *, prefix: DynamicCache | None = None
    ) -> None:
        config: Any = model.config
        super().__init__(config=config)
        gates = gates_of(model)
        if gates is None:
            raise CacheError("the model has no gates: call skipdecode.attach(model) first")
        trained = trained_schedules(model)
        schedule = schedule or choose_schedule(trained, num_layers(config))
        self.schedule = bind(schedule, config, None if gates.adapter is None else trained)
        if len(self.layers) != num_layers(config):
            raise UnsupportedModel(f"transformers keeps states of {len(self.layers)} layers of this model, not of all")
        chunked = getattr(getattr(model, "generation_config", None), "prefill_chunk_size", None)
        if chunked is not None and not schedule.is_full:
            raise CacheError(
                "chunked prefill hides where the prompt ends: set generation_config.prefill_chunk_size to None"
            )
        warn_untrained(schedule, trained)
        self._kv_shared_layers: Mapping[int, int] = kv_shared_layers(config)
        # Whether another prompt may follow: all layers still run, and none holds a recurrent state, which
        # transformers cannot always continue with several positions (Jamba).
        self._is_whole = not any(isinstance(layer, RECURRENT) for layer in self.layers)
        self.layers: list[Any] = [
            PreallocatedLayer() if type(layer) is DynamicLayer else layer for layer in self.layers
        ]
        self.step_depths: list[int] = []
        self.peak_kv_bytes = 0
        self.passes = 0
        self.width = 0  # positions of the current pass
        self.counts: list[int] = []  # number of positions that each layer runs in the current pass
        self._begins_prompt = True  # the next pass is a prompt, or continues one
        self._runs_text = False  # from the next pass on: it runs all decode steps of a text
        self._mask_sizes: list[int] = []  # by layer: number of keys in the text's pass
        self._step = 0  # decode steps since the prompt
        self._length = 0  # positions seen, including the current pass
        self._keep: frozenset[int] = frozenset(range(len(self.layers)))  # layers that the next step still runs
        self._bytes = [0] * len(self.layers)  # memory of each layer when it last ran
        if prefix is not None:
            self._begin_with(prefix)

    def _begin_with(self, prefix: DynamicCache) -> None:
        length = prefix.get_seq_length()
        if min(self.schedule.positions_per_layer(length, length)) < length:
            raise CacheError("a prefix has run all layers, and the schedule skips some in the prompt: leave it out")
        if not self._is_whole or len(prefix.layers) != len(self.layers):
            raise CacheError("no prefix can be continued: some layers hold a recurrent state, or are not this model's")
        self.layers = [_continued(layer, length) for layer in prefix.layers]
        self._length = length
        self._bytes = [layer_kv_bytes(layer) for layer in self.layers]
        self.peak_kv_bytes = sum(self._bytes)

    def begin_prompt(self) -> None:
        """Announce that the next pass runs (part of) a prompt. Raises CacheError if a layer has lost its state."""
        self._begins_prompt = True
        self._check_whole("a prompt, or a chunk of one,")

    def begin_text(self, schedule: Schedule) -> None:
        """Announce that the next pass, the last one, runs all decode steps of a text at once, as in training.

        Raises CacheError unless all layers have run all positions so far, and none holds a recurrent state.
        """
        if not self._is_whole:
            raise CacheError("a text cannot follow: some layers of this cache are retired, or hold a recurrent state")
        self.schedule = schedule
        self._runs_text = True

    def keys(self, index: int) -> int:
        """Number of positions that a mask for layer ``index`` covers in the current pass."""
        return self._mask_sizes[index] if self._mask_sizes else self.width

    def _check_whole(self, what: str) -> None:
        if self.passes and not (self._is_whole or self.schedule.is_full):
            raise CacheError(
                f"{what} came after the prompt, but layers of this cache are retired or recurrent: give the whole text "
                "and a new SkipCache"
            )

    # --- the pass: the gates ask, in network order, what each layer has to do

    def begin_layer(self, index: int, width: int) -> int:
        """Number of the pass's ``width`` positions that layer ``index`` runs: the first ones; 0 if it is skipped."""
        if index == 0:
            self._begin_pass(width)
        return self.counts[index]

    def _begin_pass(self, width: int) -> None:
        schedule = self.schedule
        count = len(self.layers)
        if self._runs_text:
            self.counts = schedule.positions_per_layer(0, width)
            owners = [self._kv_shared_layers.get(layer, layer) for layer in range(count)]
            self._mask_sizes = [self.layers[owner].get_mask_sizes(width)[0] for owner in owners]
            upcoming = count
        elif self.passes == 0 or (not schedule.is_full and (self._begins_prompt or width != 1)):
            self._check_whole(f"{width} new positions")
            # All layers ran all earlier positions, so these count as prompt: the schedule restarts after this pass.
            self.counts = schedule.positions_per_layer(width, width)
            self._step = 0
            upcoming = schedule.depth(0)
            for layer in range(count):
                if self.counts[layer] == 0:
                    self._retire(layer)
        else:
            running = schedule.layers(schedule.depth(self._step))
            self.counts = [width if layer in running else 0 for layer in range(count)]
            self._step += 1
            upcoming = schedule.depth(self._step)
            self.step_depths.append(len(running))
        self._keep = frozenset(schedule.layers(upcoming))
        self._is_whole = self._is_whole and upcoming == count
        self._begins_prompt = False
        self.passes += 1
        self.width = width
        self._length += width

    def end_layer(self, index: int) -> None:
        """Count the memory of a layer that has run, and free the layer unless the next step runs it."""
        layer = self.layers[index]
        held = layer_kv_bytes(layer)
        expected = self._length - self.width + self.counts[index]
        stored = layer.get_seq_length() if isinstance(layer, DynamicLayer) else expected
        if stored != expected or not (held or isinstance(layer, STATELESS)):
            raise CacheError(
                f"layer {index} ran without asking the SkipCache: call model.eval(), since training drops caches"
            )
        self._bytes[index] = held
        self.peak_kv_bytes = max(self.peak_kv_bytes, sum(self._bytes))
        if index not in self._keep:
            self._retire(index)

    def _retire(self, index: int) -> None:
        self.layers[index] = RetiredLayer()
        self._bytes[index] = 0

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store keys and values (batch, heads, new positions, size), and return those of all positions to attend to."""
        if not self.counts or self.counts[layer_idx] == 0:
            raise CacheError(
                f"layer {layer_idx} ran though the schedule skips it: call skipdecode.attach(model) on this very model"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    # --- lengths: never read from a layer without keys

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of positions the cache has seen, which is the same for every layer that still runs."""
        return super().get_seq_length(layer_idx) if self._attends(layer_idx) else self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(Number of keys, position of the first) that a mask for ``query_length`` new positions covers."""
        if self._attends(layer_idx):
            return super().get_mask_sizes(query_length, layer_idx)
        return self._length + query_length, 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a layer (None: any) has a recurrent state; after the prompt, layers freed since count too."""
        if layer_idx is not None and not isinstance(self.layers[layer_idx], RetiredLayer):
            return super().has_previous_state(layer_idx, state_idx)
        return self.passes > 0

    def _attends(self, layer_idx: int) -> bool:
        """Whether the layer stores keys, and so knows the text's length: not if it is recurrent or was freed."""
        layer = self.layers[layer_idx]
        return isinstance(layer, DynamicLayer) and not isinstance(layer, RetiredLayer)

    # --- operations that would undo a step

    @property
    def is_croppable(self) -> bool:
        """Whether ``generate`` may roll a step back: only if the schedule skips no layer."""
        return self.schedule.is_full and super().is_croppable

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``tokens_to_remove`` positions. Raises CacheError if the schedule skips layers."""
        if not self.schedule.is_full:
            raise CacheError("a SkipCache cannot be cropped: retired layers hold nothing to go back to")
        super().crop(tokens_to_remove)
        self._length = next((self.get_seq_length(i) for i in range(len(self.layers)) if self._attends(i)), self._length)


def _continued(layer: Any, length: int) -> Any:
    """A layer with the states of a prefix, which no update changes in place."""
    if isinstance(layer, STATELESS):
        return layer
    if not isinstance(layer, DynamicLayer) or layer.get_seq_length() != length or not length:
        raise CacheError("a prefix is a DynamicCache, or a SkipCache of the full model, in which all layers ran")
    twin: Any = object.__new__(PreallocatedLayer if type(layer) is DynamicLayer else type(layer))
    twin.__dict__.update(vars(layer))
    twin.keys = layer.keys  # with no spare room to share
    return twin


def total_kv_bytes(cache: Any) -> int:
    """Bytes of all keys, values, convolution and recurrent states in a transformers cache."""
    return sum(map(layer_kv_bytes, cache.layers))


def layer_kv_bytes(layer: Any) -> int:
    """Bytes of one cache layer's states, with spare room; tensors of one axis are no states."""
    allocated = getattr(layer, "_allocated", None)
    return sum(x.nbytes for x in _tensors(allocated or vars(layer).values()) if x.ndim > 1)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
