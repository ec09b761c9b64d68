"""Models larger than memory: decoder layers wait on the disk or in host memory, and a skipped one is never loaded.

accelerate and transformers offload the layers (``device_map``) and load each weight where it is used; gates stand above
their hooks. Here it is decided which layers are offloaded, and the layer that runs next is read ahead.
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

from ..core.checkpoint_config import default_schedule
from ..core.decays import ranking
from ..core.gate import find_cache
from ..core.stack import decoder_layers
from ..errors import MissingExtra, ModelError, UsageError
from .checkpoint_checks import as_model_error, finite
from .memory import GIB, available_memory

PLACES = ("auto", "disk", "cpu")
#: The share of the free memory that ``auto`` fills with weights: activations, keys and values need the rest.
SHARE = 0.8
#: Bytes of a page of memory: reading one byte of it reads it all.
PAGE = 4096


@dataclass(frozen=True)
class Offload:
    """Where the decoder layers are offloaded to that do not fit; embeddings, norms and head always stay.

    Args:
        place: ``disk``; ``cpu``, host memory, for a model that runs on a GPU; ``auto``: host memory where there is
            enough of it, else the disk, and only if the model does not fit.
        max_memory: GiB that weights may take on the device that computes, a running layer included. None: all layers
            are offloaded (``disk``, ``cpu``), or weights may take four fifths of what is free (``auto``).
        folder: for weights that transformers converts while it reads them (experts, files that are not safetensors):
            they are written there once more.

    Raises:
        UsageError: an unknown place, or a memory that is no positive number.
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
        """Return what ``from_pretrained`` is told; nothing if all layers stay.

        Args:
            model: on the meta device; None if it could not be made there.
            dtype: of its weights; ``auto`` is the config's.
            device: that computes.

        Raises:
            ModelError: ``max_memory`` has no room for what always stays, or the model's size is not known.
            UsageError: ``cpu`` for a model that runs there.
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
        """The layers that do not stay, given bytes of each layer and of all else."""
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
        # A ranking begins with the layers that every step runs: these stay first.
        schedule = default_schedule(config)
        for layer in schedule.ranking if schedule else ranking("top", len(sizes), warmup=1):
            room -= sizes[layer]
            if room < 0:
                offloaded.append(layer)
        return offloaded


def device_map(model: PreTrainedModel, device: str, places: Mapping[int, str]) -> dict[str, str]:
    """Return transformers' ``device_map``: decoder layers where ``places`` says, everything else on ``device``."""
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
    """Let a model that accelerate has offloaded read ahead, check weights when they first come, and run in one thread.

    To be called before :func:`skipdecode.attach`: a layer that a gate skips is not read.
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
    """Make threads wait for each other: weights that one pass has unloaded would be missing in another."""
    lock, forward = threading.RLock(), model.forward

    @functools.wraps(forward)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return forward(*args, **kwargs)

    model.forward = locked


class ReadAhead:
    """While a layer computes, a thread reads the offloaded weights of the one that runs next into the page cache.

    Depths of the steps to come are known, and so is the next layer: that of the same pass, or the first of the next
    step. Nothing is held: accelerate then loads each weight from memory instead of from the disk.

    Args:
        layers: all decoder layers of a model.

    Attributes:
        weights: of each layer, the offloaded weights by name: calls that load one.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        self.weights = [dict(_offloaded_weights(layer)) for layer in layers]
        self._checked: set[int] = set()
        self._thread: threading.Thread | None = None

    def before(self, index: int, cache: Any) -> None:
        """Layer ``index`` is about to run in a pass with a SkipCache, or with none: then all layers run.

        Raises:
            ModelError: its weights cannot be read, or are not finite.
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
        with suppress(Exception):  # it is read again, and its error raised, when the layer runs
            self._read(index)

    def _read(self, index: int) -> None:
        with as_model_error(f"the offloaded layer {index} cannot be read"):
            for name, load in self.weights[index].items():
                weight = load()
                if index in self._checked:
                    if weight.device.type == "cpu":  # by numpy: torch's threads are those that compute
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
