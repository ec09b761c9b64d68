"""Gates: each runs its decoder layer on all positions, on the first of them, or passes the hidden states on.

A gate patches the layer *instance*: no model subclass, no copied modelling code, the same state-dict keys. It acts
only if a pass carries a :class:`~skipdecode.model.cache.SkipCache` or runs inside ``teacher_forced``. Patches on the
model's entry points announce prompts, check that passes carry their cache, and provide caches.

One model is used by one thread at a time.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache

from ..errors import NOT_FINITE, CacheError, ModelError, UnsupportedModel, UsageError
from ..schedule import Schedule
from .adapter import Adapter
from .cache import SkipCache
from .cache_name import CACHE, CACHE_NAMES
from .inspect import kv_shared_layers, text_config


class Gates:
    """State that the gates of one model share."""

    def __init__(self, config: Any) -> None:
        #: By layer that attends to another layer's keys and values: that layer.
        self.kv_shared_layers = kv_shared_layers(config)
        #: Axis of the positions in hidden states: Gemma 3n has streams before the batch.
        self.axis = 2 if hasattr(text_config(config), "altup_num_inputs") else 1
        #: Acts at positions that skip layers; None: hidden states pass a skipped layer unchanged.
        self.adapter: Adapter | None = None
        #: What ``generate`` follows without a cache, if it is patched.
        self.schedule: Schedule | None = None
        #: The current :class:`~skipdecode.model.attach.TeacherForcedPass`.
        self.forced: Any = None
        #: In a layer that runs: (first position that skips layers, positions, rows of positions), if there is one.
        self.skipping: tuple[int, int, int] | None = None
        #: The cache that the next forward pass must carry.
        self.expected: weakref.ref[SkipCache] | None = None
        #: Number of values that a layer returns in a tuple, 0 if it returns a tensor; None until one has run.
        self.values: int | None = None
        #: A state that the last layer returned beside hidden states: the next one must not need it.
        self.extra_state: weakref.ref[Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model gets all but the pass that is running.
        return vars(self) | {"forced": None, "skipping": None, "expected": None, "extra_state": None}

    def learn_output(self, output: Any) -> None:
        """Remember, from one layer's output, what layers of this model return."""
        extras = output[1:] if isinstance(output, tuple) else ()
        states = (each for each in extras if isinstance(each, Tensor) and each.is_floating_point())
        self.extra_state = next(map(weakref.ref, states), None)
        self.values = len(output) if isinstance(output, tuple) else 0

    def like_output(self, hidden: Tensor) -> Any:
        """``hidden`` as layers of this model return it: alone, or as a tuple filled up with None."""
        return (hidden, *[None] * (self.values - 1)) if self.values else hidden


# --- patches


class Patch:
    """Replacement of a method of one module instance that keeps the original, which may be another patch."""

    def __init__(self, module: nn.Module, name: str, gates: Gates, place: Any = None) -> None:
        self.module = module
        self.gates = gates
        self.place = place  # index of the decoder layer, or name of the linear module
        self.original: Callable[..., Any] = getattr(module, name)
        self.was_instance_attribute = name in vars(module)  # another patch or accelerate's hook, to be restored
        # ``generate``, the Trainer and pipelines read the signature; annotations cannot always be pickled.
        assigned = ("__module__", "__name__", "__qualname__", "__doc__")
        functools.update_wrapper(cast(Any, self), self.original, assigned, updated=())


def put(kind: Callable[..., Patch], module: nn.Module, name: str, *arguments: Any) -> None:
    """Replace a method by ``kind(module, name, *arguments)``, if it exists and the module has no such patch yet."""
    if hasattr(module, name) and not any(type(patch) is kind for _, patch in patches_on(module)):
        setattr(module, name, kind(module, name, *arguments))


def patches_on(module: nn.Module) -> Iterator[tuple[str, Patch]]:
    """Yield (attribute, patch) for the patches on one module, outer before inner; accelerate may rename attributes."""
    for name, patch in list(vars(module).items()):
        while isinstance(patch, Patch):
            yield name, patch
            patch = patch.original


class Gate(Patch):
    """Replacement of one decoder layer's ``forward``."""

    # Depths change from step to step: torch.compile breaks the graph here and compiles the layer by itself.
    @torch.compiler.disable(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Output of the layer; positions that skip it keep their hidden states."""
        gates = self.gates
        cache = find_cache(args, kwargs)
        guide = gates.forced if cache is None else cache  # tells how many positions each layer runs
        if guide is None:
            return self.original(*args, **kwargs)
        if cache is None and any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            raise CacheError("a teacher-forced pass can fill no cache: call model.generate outside of teacher_forced")
        state = gates.extra_state and gates.extra_state()
        if state is not None and any(value is state for value in (*args, *kwargs.values())):
            raise UnsupportedModel("a layer hands the next one more than hidden states: none can be skipped")
        hidden = args[0] if args else kwargs["hidden_states"]
        width = hidden.shape[gates.axis]
        guide.begin_layer(self.place, width)
        counts = guide.counts
        if width != guide.width:
            # The model has dropped all but the last ``width`` positions: count which of them each layer runs.
            if self.place not in gates.kv_shared_layers:
                raise CacheError(f"layer {self.place} gets {width} of {guide.width} positions: it cannot skip")
            counts = [max(each - (guide.width - width), 0) for each in counts]
        count = counts[self.place]
        if gates.adapter is not None:
            hidden = gates.adapter.apply_before(self.place, hidden, gates.axis, counts)
            if args:
                args = (hidden, *args[1:])
            else:
                kwargs = kwargs | {"hidden_states": hidden}
        keys = guide.keys(self.place)
        if count == 0:
            if gates.values is None:
                self._learn_output(PositionSlice(width, 1, keys, gates.axis), args, kwargs)
            return gates.like_output(hidden)
        if count < width:
            args, kwargs = PositionSlice(width, count, keys, gates.axis).of_call(self.original, args, kwargs)
        if min(counts) < count:
            gates.skipping = min(counts), count, hidden.shape[gates.axis - 1]
        try:
            output = self.original(*args, **kwargs)
        finally:
            gates.skipping = None
        if cache is not None:
            cache.end_layer(self.place)
        gates.learn_output(output)
        if count == width:
            return output
        ran = output[0] if isinstance(output, tuple) else output
        rest = hidden.narrow(gates.axis, count, width - count)
        return gates.like_output(torch.cat([ran, rest.to(ran.device)], dim=gates.axis))

    def _learn_output(self, one: PositionSlice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the layer on one position, without the cache, only to learn what it returns besides hidden states."""
        args, kwargs = one.of_call(self.original, args, kwargs)
        args = tuple(None if isinstance(v, SkipCache) else v for v in args)
        kwargs = {k: None if isinstance(v, SkipCache) else v for k, v in kwargs.items()}
        with torch.no_grad(), torch.random.fork_rng():
            self.gates.learn_output(self.original(*args, **kwargs))


class LinearGate(Patch):
    """Replacement of the ``forward`` of a linear module in a layer, whose LoRA acts at positions that skip layers."""

    def __call__(self, x: Tensor) -> Tensor:
        """Output of the linear module, which positions that skip layers get from the private copy, if there is one."""
        skipping, adapter = self.gates.skipping, self.gates.adapter
        if skipping is None or adapter is None or (lora := adapter.loras.get(self.place)) is None:
            return self.original(x)
        start, positions, rows = skipping
        if start == 0:
            private = adapter.private.get(self.place)
            return self.original(x) + lora(x) if private is None else private(x)
        if x.shape[:-1].numel() != rows * positions:
            raise UnsupportedModel(f"{self.place} gets other positions than its layer: LoRA cannot tell which skip")
        y = self.original(x)
        # Some models put all rows' positions in one axis.
        parts, changed = (each.reshape(rows, positions, -1) for each in (x, y))
        change = lora(parts[:, start:])
        return torch.cat([changed[:, :start], changed[:, start:] + change], dim=1).view(y.shape)


class PatchedForward(Patch):
    """Replacement of the model's ``forward`` that raises CacheError if a pass loses its SkipCache or never uses it.

    A pass with a SkipCache whose logits are NaN or infinite raises ModelError.
    """

    @torch.compiler.disable(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Output of the model."""
        cache = find_cache(args, kwargs)
        expected = self.gates.expected and self.gates.expected()
        self.gates.expected = None
        caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
        if expected is not None and caches != [expected]:
            raise CacheError(
                "the SkipCache was dropped on the way to the model, or another put beside it, as by PEFT's prompt "
                "learning, or by long RoPE where a text passes original_max_position_embeddings: leave that out"
            )
        if cache is None and self.gates.forced is None:
            return self.original(*args, **kwargs)
        refuse_packed(kwargs)
        for name in ("output_attentions", "output_router_logits"):
            if kwargs.get(name) or getattr(self.module.config, name, False):
                raise UsageError(f"{name}: skipped layers have none, and the others would take their places")
        if cache is None:
            return self.original(*args, **{"use_cache": False} | kwargs)
        passes = cache.passes
        output = self.original(*args, **kwargs)
        if cache.passes == passes:
            raise CacheError(
                "no layer was given the SkipCache, so none was skipped: call model.eval(), since training drops caches"
            )
        if getattr(output, "logits", None) is not None and not output.logits.amax(-1).isfinite().all():
            raise ModelError(NOT_FINITE)
        return output


class PatchedPrepareInputs(Patch):
    """Replacement of ``prepare_inputs_for_generation``, the only method told that a pass belongs to a prompt."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Inputs of a forward pass; before those of a prompt, the SkipCache is told that one begins."""
        cache = find_cache(args, kwargs)
        if cache is not None:
            if kwargs.get("use_cache") is False:
                raise CacheError("with use_cache=False every step runs the whole text: leave it out, or detach(model)")
            # ``generate`` gives a decode step its length, 1. (Before 5.23, it gives a chunk of a prompt neither one.)
            new = kwargs.get("next_sequence_length")
            if kwargs.get("is_first_iteration") or new is None:
                cache.begin_prompt()
                if new is not None and new < 1:
                    raise CacheError("the cache holds the whole prompt: leave at least its last token out of a prefix")
        inputs = self.original(*args, **kwargs)
        given = kwargs.get(CACHE)
        if isinstance(given, Cache) and inputs.get(CACHE) is None and not given.get_seq_length():
            inputs[CACHE] = given  # Phi-3 drops an empty cache before a prompt that needs its long RoPE
        if cache is not None:
            self.gates.expected = weakref.ref(cache)
        return inputs


class RefusedBatching(Patch):
    """Replacement of ``init_continuous_batching``, whose passes run all layers, on a model with a schedule."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise UsageError."""
        raise UsageError("continuous batching runs all layers: call model.generate, serve with vLLM, or detach(model)")


class PatchedGenerate(Patch):
    """Replacement of ``generate`` that gives a new SkipCache to a call without a cache."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Output of ``generate``."""
        return self.original(*args, **with_cache(self.module, self.gates.schedule, kwargs))


def with_cache(model: nn.Module, schedule: Schedule | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a call of ``generate``, with a new SkipCache if they name no cache.

    Raises UsageError if they ask for another kind of cache; what the checkpoint's generation_config asks for gives way.
    """
    if any(kwargs.get(name) is not None for name in CACHE_NAMES):
        return kwargs
    given = kwargs.get("generation_config")
    if kind := kwargs.get("cache_implementation") or getattr(given, "cache_implementation", None):
        raise UsageError(f"cache_implementation={kind!r}: skipping needs a SkipCache; leave it out, or detach(model)")
    return kwargs | {CACHE: SkipCache(model, schedule), "cache_implementation": None}


# --- the arguments of a pass


@dataclass(frozen=True)
class PositionSlice:
    """The first ``queries`` of the ``width`` positions that a layer gets, which are the last of a mask's ``keys``.

    ``width`` is less than ``keys`` if a cache holds earlier positions, or if the model drops positions that its upper
    layers need not compute.
    """

    width: int
    queries: int
    keys: int
    hidden_axis: int = 1

    def of_call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """(args, kwargs) of a call of ``forward`` with every tensor of positions cut."""
        names = [*inspect.signature(forward).parameters, *[""] * len(args)]  # without a name: of ``*args``
        cut = tuple(self._cut(name, value) for name, value in zip(names, args, strict=False))
        return cut, {name: self._cut(name, value) for name, value in kwargs.items()}

    def _cut(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._cut_tensor(name, value)
        if isinstance(value, UserDict):
            return _SharedStates(value, self.keys - self.width + self.queries)
        if isinstance(value, dict):
            return {key: self._cut(name, item) for key, item in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._cut(name, item) for item in value)
        return value

    def _cut_tensor(self, name: str, value: Tensor) -> Tensor:
        seen = self.keys - self.width + self.queries  # key positions that the queries can attend to
        shape = value.shape
        is_float = value.is_floating_point() or value.is_complex()
        if value.ndim >= 3 and any(word in name for word in ("mask", "bias", "alibi")):
            # (batch, heads, queries, keys), or (batch * heads, 1, keys) with one mask for all queries.
            if shape[-1] != self.keys or shape[-2] not in (1, self.width):
                if "mask" not in name:  # a bias for the longest possible input, which the layer cuts itself
                    return value
                raise CacheError(f"{name} of shape {tuple(shape)} does not show its {self.keys} positions")
            return value[..., :seen] if shape[-2] == 1 else value[..., : self.queries, :seen]
        if value.ndim <= 2 and ("mask" in name or not is_float):  # (batch, positions): ids and padding
            if shape[-1:] == (self.keys,):
                return value[..., :seen]
            return value[..., : self.queries] if shape[-1:] == (self.width,) else value
        if not is_float:  # (sections, batch, positions)
            return value[..., : self.queries] if shape[-1] == self.width else value
        # Hidden states, and embeddings of any kind (…, positions, size).
        axes = (self.hidden_axis, value.ndim - 2) if value.ndim > 3 else (value.ndim - 2, 1)
        axis = next((axis for axis in axes if 0 <= axis < value.ndim and shape[axis] == self.width), None)
        return value if axis is None else value.narrow(axis, 0, self.queries)


class _SharedStates(UserDict[Any, Any]):
    """Keys and values that layers share: owners write to the original, borrowers read the first positions of it."""

    def __init__(self, shared: UserDict[Any, Any], seen: int) -> None:
        super().__init__()
        self.data = shared.data
        self._seen = seen

    def __getitem__(self, key: Any) -> tuple[Tensor, ...]:
        return tuple(states[..., : self._seen, :] for states in self.data[key])

    def to(self, *args: Any, **kwargs: Any) -> _SharedStates:
        """Move all tensors: accelerate moves a layer's arguments."""
        for key, states in list(self.data.items()):
            self.data[key] = tuple(x.to(*args, **kwargs) for x in states)
        return self


def refuse_packed(kwargs: Mapping[str, Any]) -> None:
    """Raise CacheError if a pass with these arguments packs several sequences into one row."""
    packed = any(key.startswith("cu_seq_lens") and value is not None for key, value in kwargs.items())
    positions = kwargs.get("position_ids")
    if isinstance(positions, Tensor) and positions.ndim == 2 and positions.shape[1] > 1:  # reading waits for the device
        restarts = (positions[:, :-1] == 0) & (positions[:, 1:] == 1)
        packed = packed or bool((restarts.sum(1) > 1).any())
    if packed:
        raise CacheError("packed (padding-free) batches cannot skip layers: give one sequence per row, left-padded")


def find_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> SkipCache | None:
    """The SkipCache among a pass's arguments; None if there is none."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, SkipCache)), None)
