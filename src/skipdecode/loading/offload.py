"""Models larger than memory: accelerate keeps decoder layers in host memory or on the disk until they run.

A skipped layer is never read, since gates skip it before accelerate's hooks run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..errors import ModelError, UsageError
from ..model.inspect import decoder_layers
from .device import free_memory

PLACES = ("auto", "disk", "cpu")
#: Share of the free memory that ``auto`` uses for weights; activations, keys and values need the rest.
SHARE = 0.8
GIB = 1 << 30


@dataclass(frozen=True)
class Offload:
    """Settings for offloading decoder layers. Embeddings, norms and head stay on the device that computes.

    Args:
        place: ``disk``; ``cpu``: host memory, for a model that runs on a GPU; ``auto``: only if the model does not fit,
            to host memory if it has room, else to the disk.
        max_memory: GiB for weights on the device that computes, one offloaded layer included. None: offload all layers
            for ``disk`` and ``cpu``; use four fifths of the free memory for ``auto``.
        folder: for a copy of weights that transformers converts while reading, such as experts.
    """

    place: str = "auto"
    max_memory: float | None = None
    folder: str | Path | None = None

    def __post_init__(self) -> None:
        if self.place not in PLACES:
            raise UsageError(f"layers are offloaded to {', '.join(PLACES[:-1])} or {PLACES[-1]}, not {self.place!r}")

    def options(self, model: PreTrainedModel, ranking: Sequence[int], device: str) -> dict[str, Any]:
        """Options for ``from_pretrained``; {} if all layers fit.

        Args:
            model: on the meta device.
            ranking: layers, those that most steps run first. These get memory first.
            device: the device that computes.
        """
        from accelerate.utils import compute_module_sizes

        if self.place == "cpu" and device == "cpu":
            raise UsageError("the model runs on the cpu: offload its layers to the disk")
        layers = decoder_layers(model)
        stack = next(name for name, module in model.named_modules() if module is layers)
        bytes_of = compute_module_sizes(model)
        sizes = [bytes_of[f"{stack}.{index}"] for index in range(len(layers))]
        offloaded = self._choose(sizes, bytes_of[""] - sum(sizes), ranking, device)
        if not offloaded:
            return {}
        place = self.place
        if place == "auto":
            needed = sum(sizes[index] for index in offloaded)
            place = "cpu" if device != "cpu" and needed < SHARE * free_memory("cpu") else "disk"
        device_map = {f"{stack}.{index}": place if index in offloaded else device for index in ranking}
        device_map |= dict.fromkeys(_outside(model, stack), device)
        return {"device_map": device_map, "offload_folder": self.folder and str(self.folder)}

    def _choose(self, sizes: list[int], fixed: int, ranking: Sequence[int], device: str) -> list[int]:
        """Layers to offload, from the bytes of each layer and of all else."""
        if self.max_memory is None and self.place != "auto":
            return list(ranking)
        budget = SHARE * free_memory(device) if self.max_memory is None else self.max_memory * GIB
        if fixed + sum(sizes) <= budget:
            return []
        room = budget - fixed - max(sizes)
        if room < 0:
            needed = (fixed + max(sizes)) / GIB
            raise ModelError(
                f"embeddings, head and one layer take {needed:.2f} GiB, weights may take {budget / GIB:.2f}: "
                "allow more memory, or a smaller dtype"
            )
        used = accumulate(sizes[layer] for layer in ranking)
        return [layer for layer, total in zip(ranking, used, strict=True) if total > room]


def _outside(model: nn.Module, stack: str) -> Iterator[str]:
    """Names of the modules and parameters that are not decoder layers."""
    for name, module in model.named_modules():
        if f"{name}.".startswith(f"{stack}."):
            continue
        if next(module.children(), None) is None:
            yield name
        else:
            yield from (f"{name}.{tensor}".lstrip(".") for tensor in (*module._parameters, *module._buffers))
