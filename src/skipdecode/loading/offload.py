"""Run models larger than memory: decoder layers stay on the disk or in host memory until they run.

accelerate offloads the layers (``device_map``) and loads weights when a layer runs; gates skip layers before its hooks
do so. This module chooses the layers to offload, and reads the next layer ahead.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import MissingExtra, ModelError, UsageError
from ..model.config import default_schedule
from ..model.gate import find_cache
from ..model.inspect import decoder_layers
from ..schedule import ranking
from .checkpoint_checks import as_model_error, finite
from .memory import GIB, available_memory

PLACES = ("auto", "disk", "cpu")
#: The share of free memory that ``auto`` uses for weights; activations, keys and values need the rest.
SHARE = 0.8
#: Bytes per memory page: reading one byte loads the page.
PAGE = 4096


@dataclass(frozen=True)
class Offload:
    """Settings for offloading decoder layers; embeddings, norms and head always stay on the device that computes.

    Args:
        place: ``disk``; ``cpu``: host memory, for a model that runs on a GPU; ``auto``: only if the model does not fit,
            to host memory if it has room, else to the disk.
        max_memory: GiB for weights on the device that computes, including one offloaded layer while it runs. None:
            offload all layers (``disk``, ``cpu``), or use four fifths of the free memory (``auto``).
        folder: holds a copy of weights that transformers converts while reading (experts, files other than
            safetensors).

    Raises:
        UsageError: an unknown place, or ``max_memory`` is no positive number.
        MissingExtra: accelerate is not installed.
    """

    place: str = "auto"
    max_memory: float | None = None
    folder: str | Path | None = None

    def __post_init__(self) -> None:
        if self.place not in PLACES:
            raise UsageError(f"layers are offloaded to {', '.join(PLACES[:-1])} or {PLACES[-1]}, not {self.place!r}")
        if self.max_memory is not None and not 0 < self.max_memory < 1e6:
            raise UsageError(f"max_memory is a number of GiB above 0, not {self.max_memory!r}")
        try:
            import accelerate  # noqa: F401
        except ModuleNotFoundError:
            raise MissingExtra("offloading needs accelerate: pip install 'skipdecode[memory]'") from None

    def options(self, model: PreTrainedModel | None, dtype: str | torch.dtype, device: str) -> dict[str, Any]:
        """Return options for ``from_pretrained``; {} if no layer is offloaded.

        Args:
            model: on the meta device; None if it cannot be made there.
            dtype: dtype of the weights; ``auto`` is the config's.
            device: the device that computes.

        Raises:
            ModelError: memory lacks room for embeddings, head and one layer, or the model's size is unknown.
            UsageError: ``place`` is ``cpu``, but the model runs on the CPU.
        """
        if model is None or getattr(model.config, "quantization_config", None):
            raise ModelError("this model cannot be offloaded: its size is not known before it is read")
        if self.place == "cpu" and device == "cpu":
            raise UsageError("the model runs on the cpu: offload its layers to the disk")
        named = (model.config.dtype or torch.float32) if dtype == "auto" else dtype
        kind: torch.dtype = getattr(torch, named) if isinstance(named, str) else named
        sizes = [_bytes(layer, kind) for layer in decoder_layers(model)]
        offloaded = self._offloaded(sizes, _bytes(model, kind) - sum(sizes), device, model.config)
        if not offloaded:
            return {}
        place = self.place
        if place == "auto":
            in_host = device != "cpu" and sum(sizes[layer] for layer in offloaded) < SHARE * available_memory("cpu")
            place = "cpu" if in_host else "disk"
        folder = None if self.folder is None else str(self.folder)
        return {"device_map": device_map(model, device, dict.fromkeys(offloaded, place)), "offload_folder": folder}

    def _offloaded(self, sizes: list[int], fixed: int, device: str, config: Any) -> list[int]:
        """Return the layers to offload, given the bytes of each layer (``sizes``) and of all else (``fixed``)."""
        if self.max_memory is not None:
            budget = self.max_memory * GIB
        elif self.place == "auto":
            budget = SHARE * available_memory(device)
        else:
            return list(range(len(sizes)))
        if fixed + sum(sizes) <= budget:
            return []
        room = budget - fixed - max(sizes)
        if room < 0:
            raise ModelError(
                f"embeddings, head and the layer that runs take {(fixed + max(sizes)) / GIB:.2f} GiB, but the weights "
                f"may take {budget / GIB:.2f}: allow more memory, or take a smaller dtype"
            )
        offloaded = []
        # A ranking begins with the layers that most steps run: these get memory first.
        schedule = default_schedule(config)
        for layer in schedule.ranking if schedule else ranking("top", len(sizes), warmup=1):
            room -= sizes[layer]
            if room < 0:
                offloaded.append(layer)
        return offloaded


def device_map(model: PreTrainedModel, device: str, places: Mapping[int, str]) -> dict[str, str]:
    """Return a ``device_map`` that places decoder layers by index, as ``places`` says, and all else on ``device``."""
    layers = decoder_layers(model)
    stack = next(name for name, module in model.named_modules() if module is layers)
    found = {f"{stack}.{index}": places.get(index, device) for index in range(len(layers))}
    above = stack.split(".")[:-1]
    for depth in range(len(above) + 1):
        prefix = "".join(f"{name}." for name in above[:depth])
        module = model.get_submodule(prefix[:-1])
        parts = [dict(module.named_children()), module._parameters, module._buffers]
        names = [prefix + name for part in parts for name in part]
        found |= {name: device for name in names if name != stack and not stack.startswith(f"{name}.")}
    return found


def _bytes(module: nn.Module, dtype: torch.dtype) -> int:
    tensors = [*module.parameters(), *module.buffers()]
    return sum(t.numel() * (dtype.itemsize if t.is_floating_point() else t.element_size()) for t in tensors)


def prepare_offloaded(model: PreTrainedModel) -> None:
    """Make an offloaded model read layers ahead, check weights at their first use, and run one pass at a time.

    Call it before :func:`skipdecode.attach`, so that layers that a gate skips are not read.
    """
    from accelerate.hooks import ModelHook, add_hook_to_module

    ahead = ReadAhead(decoder_layers(model))

    class Before(ModelHook):
        def __init__(self, index: int) -> None:
            self.index = index

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            ahead.before(self.index, find_cache(args, kwargs))
            return args, kwargs

    for index, layer in enumerate(decoder_layers(model)):
        if ahead.weights[index]:
            add_hook_to_module(layer, Before(index), append=True)
    _one_pass_at_a_time(model)


def _one_pass_at_a_time(model: PreTrainedModel) -> None:
    """Put a lock around ``model.forward``: a pass in another thread would miss weights that this one unloads."""
    lock, forward = threading.RLock(), model.forward

    @functools.wraps(forward)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return forward(*args, **kwargs)

    model.forward = locked


class ReadAhead:
    """Reads the next layer's offloaded weights into the page cache, in a thread, while a layer computes.

    The schedule tells which layer runs next, in this pass or the next step. This class keeps no weights: accelerate
    then loads them from the page cache instead of the disk.

    Args:
        layers: all decoder layers of a model.

    Attributes:
        weights: for each layer, a function per offloaded weight that loads it, by name.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        self.weights = [dict(_offloaded_weights(layer)) for layer in layers]
        self._checked: set[int] = set()
        self._thread: threading.Thread | None = None

    def before(self, index: int, cache: Any) -> None:
        """Check layer ``index`` at its first run, and start to read the one to run next, by ``cache`` (None: all run).

        Raises:
            ModelError: the layer's weights cannot be read, or are not finite.
        """
        if self._thread is not None:
            self._thread.join()
        if index not in self._checked:
            self._read(index)
        every = range(len(self.weights))
        coming = cache.upcoming(index) if cache is not None else [*every[index + 1 :], *every]
        following = next((layer for layer in coming if self.weights[layer]), index)
        if following != index:
            self._thread = threading.Thread(target=self._try_read, args=(following,), daemon=True)
            self._thread.start()

    def _try_read(self, index: int) -> None:
        with suppress(Exception):  # ``before`` reads the layer again, and raises its error
            self._read(index)

    def _read(self, index: int) -> None:
        with as_model_error(f"the offloaded layer {index} cannot be read"):
            for name, load in self.weights[index].items():
                weight = load()
                if index in self._checked:
                    if weight.device.type == "cpu":  # by numpy: torch would take threads from the layer that computes
                        weight.detach().view(-1).view(torch.uint8).numpy()[::PAGE].max(initial=0)
                elif weight.is_floating_point() and not finite(weight):
                    raise ModelError(f"layer {index}: {name} holds values that are not finite")
        self._checked.add(index)


def _offloaded_weights(layer: nn.Module) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    from accelerate.hooks import AlignDevicesHook
    from accelerate.utils import named_module_tensors

    for path, part in layer.named_modules():
        hook = getattr(part, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            if isinstance(each, AlignDevicesHook) and each.offload:
                options = {"include_buffers": each.offload_buffers, "recurse": each.place_submodules}
                for name, _ in named_module_tensors(part, remove_non_persistent=True, **options):
                    yield f"{path}.{name}".lstrip("."), functools.partial(each.weights_map.__getitem__, name)
