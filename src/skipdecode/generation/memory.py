"""How much memory there is for what is about to be put into it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

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
