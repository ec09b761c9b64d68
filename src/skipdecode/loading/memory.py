"""Measure how much memory is free."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path, PurePosixPath

import torch

from ..errors import MissingExtra, UsageError

GIB = 1 << 30
#: Memory files of control groups (cgroup), versions 2 and 1: folder of the outermost group, the controller's name in
#: :data:`OWN_GROUPS`, file with the limit, file with the use, and the prefix in ``memory.stat`` of counters that
#: include child groups.
CGROUPS = (
    (Path("/sys/fs/cgroup"), "", "memory.max", "memory.current", ""),
    (Path("/sys/fs/cgroup/memory"), "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
#: Where the kernel says in which groups this process is.
OWN_GROUPS = Path("/proc/self/cgroup")


def available_memory(device: str | torch.device) -> int:
    """Return the bytes that can be allocated on ``device`` now; the page cache counts as free.

    For a CPU, these are the smaller of the machine's free memory and what a container's limits leave.

    Raises:
        MissingExtra: psutil, which measures a CPU's memory, is not installed.
        UsageError: free memory cannot be measured on this kind of device.
    """
    place = torch.device(device)
    if place.type not in ("cpu", "cuda"):
        raise UsageError(f"free memory of {place.type} is not known: give max_memory, not auto")
    if place.type == "cuda":
        # Memory that torch has reserved but does not use is free for this process, though not for the driver.
        unused = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
        return torch.cuda.mem_get_info(place)[0] + unused
    try:
        import psutil
    except ModuleNotFoundError:
        raise MissingExtra("psutil is not installed: pip install 'skipdecode[memory]'") from None
    return max(min([psutil.virtual_memory().available, *_cgroup_rooms()]), 0)


def _cgroup_rooms() -> list[int]:
    """Return the bytes that each memory limit leaves: a container's, a job's, a service's; an empty list without."""
    own: dict[str, str] = {}
    with suppress(OSError):  # lines like 0::/system.slice/job.scope
        own = {line.split(":")[1]: line.split(":", 2)[2] for line in OWN_GROUPS.read_text().splitlines()}
    rooms = []
    for outermost, name, limit, used, prefix in CGROUPS:
        inner = PurePosixPath(own.get(name, "/").lstrip("/"))
        for group in (inner, *inner.parents):
            with suppress(OSError, ValueError):  # no such group, or "max"
                folder = outermost / group
                room = int((folder / limit).read_text()) - int((folder / used).read_text())
                # The use includes the page cache of the group's files, which the system can free.
                rooms.append(room + _file_bytes(folder / "memory.stat", prefix))
    return rooms


def _file_bytes(stat: Path, prefix: str) -> int:
    """Return the bytes of page cache that count as a control group's use; 0 if ``stat`` cannot be read."""
    with suppress(OSError, ValueError):
        held = dict(line.split() for line in stat.read_text().splitlines())
        return sum(int(held.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
    return 0
