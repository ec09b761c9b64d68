"""The machine and versions that numbers are of, and the memory in use."""

from __future__ import annotations

import platform

import torch
import transformers

from .loading import cpu_capabilities


def machine(device: str | None = None) -> str:
    """The machine and versions, to stand beside every number; ``device`` as :func:`skipdecode.load` takes it."""
    if torch.cuda.is_available() and (device is None or device.startswith("cuda")):
        device = torch.cuda.get_device_name(device)
    else:
        name = cpu_capabilities().get("cpu_name") or platform.machine()
        device = f"{name}, {torch.get_num_threads()} threads"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{device}; {versions}, Python {platform.python_version()}"


def resident_bytes() -> int:
    """Memory of this process that is in RAM now; 0 where psutil is not installed."""
    try:
        import psutil
    except ImportError:
        return 0
    return int(psutil.Process().memory_info().rss)
