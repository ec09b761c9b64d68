"""How much memory there is, and how much a computation takes."""

from __future__ import annotations

import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import MissingExtra, UsageError

GIB = 1 << 30
#: Of the control group that containers run in, version 2 and 1: folder, files of its limit and of what is in use, and
#: how the names of what it and its children hold begin in ``memory.stat``.
CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", ""),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def available_memory(device: str | torch.device, kept: int = 0) -> int:
    """Bytes that can be allocated on ``device`` now, files in the page cache not counted as in use.

    Args:
        device: a CPU means this machine or, where it has less left, the container's limit.
        kept: bytes of files in a CPU's page cache that are to stay there.

    Raises:
        MissingExtra: psutil, which knows it for a CPU, is not installed.
        UsageError: nobody knows it for this kind of device.
    """
    place = torch.device(device)
    if place.type not in ("cpu", "cuda", "mps"):
        raise UsageError(f"free memory of {place.type} is not known: give numbers (batch size, max_memory), not auto")
    if place.type == "cuda":
        # What torch holds and does not use is free for us, though not for the driver.
        unused = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
        return torch.cuda.mem_get_info(place)[0] + unused
    if place.type == "mps":  # it shares its memory with the CPU, and may take a part of it
        unused = torch.mps.driver_allocated_memory() - torch.mps.current_allocated_memory()
        rest = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return max(min(rest, available_memory("cpu")), 0) + unused
    return max(min([_psutil().virtual_memory().available - kept, *_cgroup_rooms(kept)]), 0)


def _psutil() -> Any:
    try:
        import psutil
    except ModuleNotFoundError:
        raise MissingExtra("psutil is not installed: pip install 'skipdecode[memory]'") from None
    return psutil


def _cgroup_rooms(kept: int) -> list[int]:
    """What a container's limit leaves; nothing where there is none."""
    rooms = []
    for folder, limit, used, prefix in CGROUPS:
        with suppress(OSError, ValueError):  # no such group, or "max"
            room = int((folder / limit).read_text()) - int((folder / used).read_text())
            # In use are files too, as far as they were read from within the group; the system drops them for others.
            rooms.append(room + max(_file_bytes(folder / "memory.stat", prefix) - kept, 0))
    return rooms


def _file_bytes(stat: Path, prefix: str) -> int:
    """Bytes of the page cache that a control group is charged with; 0 where it does not say."""
    with suppress(OSError, ValueError):
        held = dict(line.split() for line in stat.read_text().splitlines())
        return sum(int(held.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
    return 0


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
    if value.layout == torch._mkldnn:  # type: ignore[attr-defined]  # weights in a layout of oneDNN's own: given, never made
        return 0
    return value.untyped_storage().data_ptr()
