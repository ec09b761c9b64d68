"""How much memory there is, and how much a computation takes."""

from __future__ import annotations

import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import MissingExtra

GIB = 1 << 30
#: (limit, in use) of the control group that containers run in: version 2, version 1.
CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def available_memory(device: str | torch.device) -> int:
    """Bytes that can be allocated on ``device`` now, files in the page cache not counted as in use.

    Raises:
        MissingExtra: psutil, which knows it for a CPU, is not installed.
    """
    place = torch.device(device)
    if place.type == "cuda":
        # What torch holds and does not use is free for us, though not for the driver.
        unused = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
        return torch.cuda.mem_get_info(place)[0] + unused
    return min([_psutil().virtual_memory().available, *_cgroup_rooms()])


def _psutil() -> Any:
    try:
        import psutil
    except ModuleNotFoundError:
        raise MissingExtra("psutil is not installed: pip install 'skipdecode[memory]'") from None
    return psutil


def _cgroup_rooms() -> list[int]:
    """What a container's limit leaves; nothing where there is none."""
    rooms = []
    for limit, used in CGROUPS:
        with suppress(OSError, ValueError):  # no such group, or "max"
            rooms.append(max(int(limit.read_text()) - int(used.read_text()), 0))
    return rooms


def mapped_bytes() -> int:
    """Bytes of files that this process has mapped into memory and that are there now; 0 where it cannot be told."""
    return int(getattr(_psutil().Process().memory_info(), "shared", 0))


class PeakMeter(TorchDispatchMode):
    """The most bytes that tensors took at once which were made inside it, on any device.

    What a kernel takes for itself while it runs is not seen.

    Attributes:
        peak: that many.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._held: dict[int, int] = {}  # bytes of the storages that are alive, by their addresses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_address(value) for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)}
        for value in tree_leaves(result):
            # What shares its memory with what it was made of is no new memory.
            where = _address(value) if isinstance(value, torch.Tensor) else 0
            if where and where not in given and where not in self._held:
                storage = value.untyped_storage()
                self._held[where] = storage.nbytes()
                weakref.finalize(storage, self._held.pop, where, None).atexit = False
        self.peak = max(self.peak, sum(self._held.values()))
        return result


def _address(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()
