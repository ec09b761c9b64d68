"""An offloaded layer has its weights while it runs; the next one that will run is fetched meanwhile.

Depths of the steps to come are known, so it is known which layer is next: the next of this pass, or the first of the
next step. At most two layers are in memory at once: the one that computes and the one that comes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils import named_module_tensors
from torch import Tensor, nn
from transformers import Cache

from ..core.gate import Gate, find_cache
from ..core.stack import decoder_layers
from ..errors import ModelError, UsageError
from .checkpoint_checks import as_model_error, finite

PAGE = 4096

#: Weights of one layer: their names in it, and where each is read.
Sources = dict[str, Callable[[], Tensor]]


class Streaming:
    """The offloaded layers of one model. One pass at a time goes through it.

    Attributes:
        loads: times that each layer was loaded.
    """

    def __init__(self, layers: nn.ModuleList, sources: dict[int, Sources], device: torch.device, prefetch: bool):
        self.layers = layers
        self.sources = sources
        self.device = device
        self.prefetch = prefetch
        self.loads: Counter[int] = Counter()
        self._held: int | None = None  # the layer that has its weights
        self._next: int | None = None  # the one that will run after it
        self._coming: _Fetch | None = None
        self._sound: set[int] = set()  # layers whose weights were found to be finite
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def enter(self, index: int, cache: Any, rest: bool) -> None:
        """Layer ``index`` is about to run: it gets its weights, and the fetch of its successor begins.

        Args:
            cache: a SkipCache, or None: then all layers run.
            rest: whether another pass will come: a cache of any kind is there.

        Raises:
            ModelError: the weights cannot be read, or are not finite; also where that was found in the background.
        """
        if self._held != index:
            self._let_go()
            self._put(index, self._take(index))
        every = range(len(self.layers))
        coming = cache.upcoming(index) if cache is not None else [*every[index + 1 :], *(every if rest else ())]
        self._next = next((layer for layer in coming if layer in self.sources), None)
        if self.prefetch and self._next not in (None, index):
            self._coming = _Fetch(self._next, self._load)

    def leave(self, index: int) -> None:
        """The layer has run: its weights go, unless it is the very next to run."""
        if self._next != index:
            self._let_go()

    def _take(self, index: int) -> dict[str, Tensor]:
        coming, self._coming = self._coming, None
        # Another layer than was expected (a text ended, a layer was given nothing to do): what comes is let go.
        weights = coming.result() if coming is not None else None
        if coming is None or coming.index != index:
            weights = None
            weights = self._load(index)
        assert weights is not None
        return weights

    def _load(self, index: int) -> dict[str, Tensor]:
        """Read a layer's weights, to the last page: a file that is mapped into memory is only read when touched."""
        self.loads[index] += 1
        with as_model_error(f"the offloaded layer {index} cannot be read"), torch.cuda.stream(self._side):
            weights = {name: read().to(self.device) for name, read in self.sources[index].items()}
            if index not in self._sound:
                for name, weight in weights.items():
                    if weight.is_floating_point() and not finite(weight):
                        raise ModelError(f"layer {index}: {name} holds values that are not finite")
                self._sound.add(index)
            elif self.device.type == "cpu":
                for weight in weights.values():
                    # numpy: torch's threads for it would be those that compute.
                    weight.detach().view(-1).view(torch.uint8).numpy()[::PAGE].max(initial=0)
        if self._side is not None:
            self._side.synchronize()
        return weights

    def _put(self, index: int, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            if weight.is_cuda:  # made on a stream of its own, and not to be reused before this one is through with it
                weight.record_stream(torch.cuda.current_stream(weight.device))
            self._set(index, name, weight)
        self._held = index

    def _let_go(self) -> None:
        if self._held is not None:
            for name in self.sources[self._held]:
                self.empty(self._held, name)
            self._held = None

    def empty(self, index: int, name: str) -> None:
        """Leave nothing of a weight but its shape."""
        owner, last = _owner(self.layers[index], name)
        self._set(index, name, owner[last].detach().to("meta"))

    def _set(self, index: int, name: str, weight: Tensor) -> None:
        owner, last = _owner(self.layers[index], name)
        old = owner[last]
        owner[last] = nn.Parameter(weight, old.requires_grad) if isinstance(old, nn.Parameter) else weight


class _Fetch(threading.Thread):
    """One layer, read in the background. The thread ends with it, whatever becomes of the pass."""

    def __init__(self, index: int, load: Callable[[int], dict[str, Tensor]]) -> None:
        super().__init__(name=f"skipdecode-fetch-{index}", daemon=True)
        self.index = index
        self._load = load
        self._weights: dict[str, Tensor] = {}
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Read it; what goes wrong is kept for who waits."""
        try:
            self._weights = self._load(self.index)
        except BaseException as error:
            self._error = error

    def result(self) -> dict[str, Tensor]:
        """The weights, once they are there. Raises what reading them raised."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._weights


class LayerHook(ModelHook):
    """accelerate's hook around the ``forward`` of one offloaded layer."""

    def __init__(self, streaming: Streaming, index: int) -> None:
        self.streaming = streaming
        self.index = index

    @property
    def weights_map(self) -> dict[str, Tensor]:
        """The layer's weights: transformers reads them when the model is saved."""
        return {name: read() for name, read in self.streaming.sources[self.index].items()}

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The weights come."""
        rest = any(isinstance(value, Cache) for value in (*args, *kwargs.values()))
        self.streaming.enter(self.index, find_cache(args, kwargs), rest)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """The weights go."""
        self.streaming.leave(self.index)
        return output


def stream(model: nn.Module, *, prefetch: bool = True) -> Streaming | None:
    """Load offloaded decoder layers whole, each while it runs, instead of weight by weight. None if there are none.

    For a model that accelerate has offloaded (``device_map``, ``cpu_offload``, ``disk_offload``) and that computes on
    one device; before or after :func:`skipdecode.attach`.

    Raises:
        UsageError: it computes on several devices.
    """
    layers = decoder_layers(model)
    sources = {index: found for index, layer in enumerate(layers) if (found := _sources(layer))}
    devices = {torch.device(hook.execution_device) for layer in layers for _, _, hook in _aligning(layer)}
    if not sources:
        return None
    if len(devices) > 1:
        raise UsageError(f"layers are fetched for one device, not for {', '.join(sorted(map(str, devices)))}")
    streaming = Streaming(layers, sources, devices.pop(), prefetch)
    for index, layer in enumerate(layers):
        _rehook(layer, LayerHook(streaming, index) if index in sources else None)
        for name in sources.get(index, ()):  # accelerate puts back what it found
            streaming.empty(index, name)
    return streaming


def streaming_of(model: nn.Module) -> Streaming | None:
    """What :func:`stream` returned for the model; None if its layers stay."""
    hooks = (getattr(layer, "_hf_hook", None) for layer in decoder_layers(model))
    return next((hook.streaming for hook in hooks if isinstance(hook, LayerHook)), None)


def _aligning(layer: nn.Module) -> Iterator[tuple[str, nn.Module, AlignDevicesHook]]:
    """accelerate's hooks on a layer and its parts that say where they run: (the part's name, the part, its hook)."""
    for name, part in layer.named_modules():
        hook = getattr(part, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            if isinstance(each, AlignDevicesHook) and each.execution_device is not None:
                yield name, part, each


def _sources(layer: nn.Module) -> Sources:
    """Where the offloaded weights of a layer are read."""
    found: Sources = {}
    for name, part, hook in _aligning(layer):
        if hook.offload:
            tensors = named_module_tensors(
                part, include_buffers=hook.offload_buffers, recurse=hook.place_submodules, remove_non_persistent=True
            )
            for key, _ in tensors:
                found[f"{name}.{key}" if name else key] = partial(hook.weights_map.__getitem__, key)
    return found


def _rehook(layer: nn.Module, hook: LayerHook | None) -> None:
    """``hook`` instead of accelerate's, and below a gate: a layer that is skipped is not loaded."""
    gate: Gate | None = None
    for again in (False, True):  # a gate may stand above accelerate's hooks, or below them
        if isinstance(layer.forward, Gate):
            gate, layer.forward = layer.forward, layer.forward.original
        if not again:
            remove_hook_from_module(layer, recurse=True)
    if hook is not None:
        add_hook_to_module(layer, hook)
    if gate is not None:
        gate.original, gate.was_instance_attribute, layer.forward = layer.forward, True, gate


def _owner(layer: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dictionary of a layer's part that holds a parameter or buffer, and its key there."""
    path, _, last = name.rpartition(".")
    part = layer.get_submodule(path)
    return (part._parameters if last in part._parameters else part._buffers), last
