"""The machine and versions that numbers are of, and the memory in use."""

from __future__ import annotations

import platform
from typing import Any

import torch
import transformers

from ..core.cost import Profile, shape_of
from .loading import cpu_capabilities, placement


def machine(device: str | None = None) -> str:
    """The machine and versions, to stand beside every number; ``device`` as :func:`skipdecode.load` takes it."""
    if torch.cuda.is_available() and (device is None or device.startswith("cuda")):
        device = torch.cuda.get_device_name(device)
    else:
        name = cpu_capabilities().get("cpu_name") or platform.machine()
        device = f"{name}, {torch.get_num_threads()} threads"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{device}; {versions}, Python {platform.python_version()}"


def check_profile(
    profile: Profile, config: Any, dtype: str = "auto", device: str | None = None, **options: Any
) -> None:
    """Whether a profile is of this machine, and of models of this config placed and made faster so.

    Raises:
        UsageError: it is not; the message says what differs.
        ModelError: there is no such device.
    """
    kind, place = placement(config, dtype, device)
    kind = config.dtype if kind == "auto" else kind
    profile.check(
        shape=shape_of(config),
        machine=machine(place),
        device=torch.device(place).type,
        dtype=str(kind).removeprefix("torch."),
        options=options,
    )


def resident_bytes() -> int:
    """Memory of this process that is in RAM now; 0 where psutil is not installed."""
    try:
        import psutil
    except ImportError:
        return 0
    return int(psutil.Process().memory_info().rss)
