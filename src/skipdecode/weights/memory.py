"""Measure how much memory is free, and how much a computation takes."""

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
#: Memory files of a container's control group (cgroup), versions 2 and 1: folder, file with the limit, file with the
#: use, and the prefix in ``memory.stat`` of counters that include child groups.
CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", ""),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def available_memory(device: str | torch.device, kept: int = 0) -> int:
    """Return the bytes that can be allocated on ``device`` now; the page cache counts as free.

    Args:
        device: for a CPU, the smaller of the machine's free memory and what a container's limit leaves.
        kept: bytes of files that must stay in a CPU's page cache, and count as used.

    Raises:
        MissingExtra: psutil, which measures a CPU's memory, is not installed.
        UsageError: free memory cannot be measured on this kind of device.
    """
    place = torch.device(device)
    if place.type not in ("cpu", "cuda", "mps"):
        raise UsageError(f"free memory of {place.type} is not known: give numbers (batch size, max_memory), not auto")
    if place.type == "cuda":
        # Memory that torch has reserved but does not use is free for this process, though not for the driver.
        unused = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
        return torch.cuda.mem_get_info(place)[0] + unused
    if place.type == "mps":  # it may use a part of the CPU's memory
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
    """Return the bytes that the limits of a container leave; an empty list without limits."""
    rooms = []
    for folder, limit, used, prefix in CGROUPS:
        with suppress(OSError, ValueError):  # no such group, or "max"
            room = int((folder / limit).read_text()) - int((folder / used).read_text())
            # The use includes the page cache of the group's files, which the system can free.
            rooms.append(room + max(_file_bytes(folder / "memory.stat", prefix) - kept, 0))
    return rooms


def _file_bytes(stat: Path, prefix: str) -> int:
    """Return the bytes of page cache that count as a control group's use; 0 if ``stat`` cannot be read."""
    with suppress(OSError, ValueError):
        held = dict(line.split() for line in stat.read_text().splitlines())
        return sum(int(held.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
    return 0


def mapped_bytes() -> int:
    """Return the bytes of memory-mapped files that this process has in memory; 0 if the system does not say."""
    return int(getattr(_psutil().Process().memory_info(), "shared", 0))


class PeakMeter(TorchDispatchMode):
    """A context that measures the ``peak`` bytes of tensors made inside it, on any device, without kernels' buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._held: dict[int, int] = {}  # bytes of each live storage by address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_address(value) for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)}
        for value in tree_leaves(result):
            # Views share the storage of an input, and take no new memory.
            where = _address(value) if isinstance(value, torch.Tensor) else 0
            if where and where not in given and where not in self._held:
                storage = value.untyped_storage()
                self._held[where] = storage.nbytes()
                weakref.finalize(storage, self._held.pop, where, None).atexit = False
        self.peak = max(self.peak, sum(self._held.values()))
        return result


def _address(value: torch.Tensor) -> int:
    if value.layout == torch._mkldnn:  # type: ignore[attr-defined]  # packed weights: inputs of kernels, never outputs
        return 0
    return value.untyped_storage().data_ptr()
