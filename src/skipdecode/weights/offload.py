"""Models larger than memory: layers wait on the disk or in host memory, and a layer that is skipped is never loaded.

accelerate and transformers put the layers there (``device_map``); the weights are read straight from the checkpoint's
safetensors files where they are used as they were saved. Here it is decided which layers wait, by
:class:`Offload`; :mod:`.streaming` brings one in when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..core.checkpoint_config import default_schedule
from ..core.schedule import Schedule
from ..core.stack import decoder_layers
from ..errors import MissingExtra, ModelError, UsageError
from .memory import GIB, available_memory

PLACES = ("auto", "disk", "cpu")
#: The share of the free memory that ``auto`` fills with weights: texts in the making need the rest.
SHARE = 0.8


@dataclass(frozen=True)
class Offload:
    """Where the decoder layers wait that do not fit; embeddings, norms and head always stay.

    Args:
        place: ``disk``; ``cpu``, host memory, for a model that runs on a GPU; ``auto``: host memory where there is
            enough of it, else the disk, and only if the model does not fit.
        max_memory: GiB that weights may take on the device that computes, a layer that runs and the one fetched
            meanwhile included. None: no layer stays (``disk``, ``cpu``), or four fifths of what is free (``auto``).
        folder: for weights that transformers converts while it reads them (experts, files that are not safetensors):
            they are written there once more.
        ranking: layers, those first that are to stay if there is room: a schedule's ranking begins with those that
            every step runs. None: that of the checkpoint's schedule, else of the order ``top``.
        prefetch: fetch the next layer that runs while one computes.

    Raises:
        UsageError: values that mean nothing.
    """

    place: str = "auto"
    max_memory: float | None = None
    folder: str | Path | None = None
    ranking: Sequence[int] | None = None
    prefetch: bool = True

    def __post_init__(self) -> None:
        if self.place not in PLACES:
            raise UsageError(f"layers are offloaded to {', '.join(PLACES[:-1])} or {PLACES[-1]}, not {self.place!r}")
        if self.max_memory is not None and not 0 < self.max_memory < 1e6:
            raise UsageError(f"max_memory is a number of GiB above 0, not {self.max_memory!r}")
        try:
            import accelerate  # noqa: F401
        except ModuleNotFoundError:
            raise MissingExtra("offloading needs accelerate: pip install 'skipdecode[memory]'") from None

    @classmethod
    def of(cls, value: str | Offload | None, ranking: Sequence[int] | None = None) -> Offload | None:
        """What a caller gives: a place, all of it, or None. ``ranking`` fills in for one that was not given."""
        offload = cls(value) if isinstance(value, str) else value
        return offload if offload is None or offload.ranking is not None else replace(offload, ranking=ranking)

    def options(self, sketch: PreTrainedModel | None, dtype: str | torch.dtype, device: str) -> dict[str, Any]:
        """What ``from_pretrained`` is told; empty if all layers stay.

        Args:
            sketch: the model on the meta device.
            dtype: of its weights; ``auto`` is the config's.
            device: that computes.

        Raises:
            ModelError: ``max_memory`` has no room for what always stays, or the model cannot be laid out beforehand.
            UsageError: ``cpu`` for a model that runs there.
        """
        if sketch is None or getattr(sketch.config, "quantization_config", None):
            raise ModelError("this model cannot be offloaded: its size is not known before it is read")
        if self.place == "cpu" and device == "cpu":
            raise UsageError("the model runs on the cpu: offload its layers to the disk")
        named = (sketch.config.dtype or torch.float32) if dtype == "auto" else dtype
        kind: torch.dtype = getattr(torch, named) if isinstance(named, str) else named
        sizes = [_bytes(layer, kind) for layer in decoder_layers(sketch)]
        away = self._away(sizes, _bytes(sketch, kind) - sum(sizes), self._budget(device), sketch.config)
        if not away:
            return {}
        place = self.place
        if place == "auto":
            waiting = sum(sizes[layer] for layer in away)
            place = "cpu" if device != "cpu" and waiting < SHARE * available_memory("cpu") else "disk"
        folder = None if self.folder is None else str(self.folder)
        return {"device_map": device_map(sketch, device, dict.fromkeys(away, place)), "offload_folder": folder}

    def _budget(self, device: str) -> float | None:
        """Bytes for weights; None: as little as can be."""
        if self.max_memory is not None:
            return self.max_memory * GIB
        return SHARE * available_memory(device) if self.place == "auto" else None

    def _away(self, sizes: list[int], fixed: int, budget: float | None, config: Any) -> list[int]:
        """The layers that wait elsewhere."""
        if budget is None:
            return list(range(len(sizes)))
        if fixed + sum(sizes) <= budget:
            return []
        passing = max(sizes) * (2 if self.prefetch else 1)
        room = budget - fixed - passing
        if room < 0:
            raise ModelError(
                f"embeddings, head and the layers that run take {(fixed + passing) / GIB:.2f} GiB, but the model may "
                f"take {budget / GIB:.2f}: give more --max-memory, or a smaller --dtype"
            )
        away = []
        # In the order of a schedule, the first layers run at every step: those that wait run in few.
        for layer in self.ranking or (default_schedule(config) or Schedule.full(len(sizes))).ranking:
            room -= sizes[layer]
            if room < 0:
                away.append(layer)
        return away


def device_map(model: PreTrainedModel, device: str, elsewhere: dict[int, str]) -> dict[str, str]:
    """transformers' ``device_map``: decoder layers as ``elsewhere`` says, everything else on ``device``."""
    layers = decoder_layers(model)
    stack = next(name for name, module in model.named_modules() if module is layers)
    found = {f"{stack}.{index}": elsewhere.get(index, device) for index in range(len(layers))}
    above = stack.split(".")[:-1]
    for depth in range(len(above) + 1):
        prefix = "".join(f"{name}." for name in above[:depth])
        module = model.get_submodule(prefix[:-1])
        parts = [dict(module.named_children()), module._parameters, module._buffers]
        names = [prefix + name for part in parts for name in part]
        found |= {name: device for name in names if name != stack and not stack.startswith(f"{name}.")}
    return found


def _bytes(module: torch.nn.Module, dtype: torch.dtype) -> int:
    tensors = [*module.parameters(), *module.buffers()]
    return sum(t.numel() * (dtype.itemsize if t.is_floating_point() else t.element_size()) for t in tensors)
