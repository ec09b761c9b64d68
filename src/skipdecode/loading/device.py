"""Choose and check devices and dtypes, wait for devices, and describe the machine that numbers are measured on."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from ..errors import ModelError

DTYPES = ("float32", "bfloat16", "float16")


def placement(config: Any, dtype: str | torch.dtype, device: str | None) -> tuple[str | torch.dtype, str]:
    """Return the dtype and device to run a model with this config on. Raises ModelError if there are none such.

    For device None it is an accelerator, if there is one, else the CPU. There dtype ``auto`` becomes float32, unless
    the config says bfloat16 and the CPU multiplies it in hardware; elsewhere it stays ``auto``.
    """
    device = default_device() if device is None else device
    check_device(device)
    check_dtype(dtype)
    device = "cpu" if torch.device(device).type == "cpu" else device  # cpu:0 is the same
    if dtype == "auto" and device == "cpu" and (config.dtype != torch.bfloat16 or not _fast_bfloat16()):
        dtype = torch.float32
    return dtype, device


def default_device() -> str:
    """Return the type of the accelerator, if there is one, else ``cpu``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def check_device(device: str) -> None:
    """Raise ModelError if the device is missing or computes nothing (``meta``)."""
    try:
        place = torch.device(device)
        torch.zeros(1, device=place)
    except (RuntimeError, AssertionError, ImportError) as error:
        line = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"there is no device {device!r} here: {line}") from error
    if place.type == "meta" or (place.type == "cpu" and place.index):
        raise ModelError(f"there is no device {device!r} here that computes")


def is_here(device: str) -> bool:
    """Return whether this machine has such a device."""
    try:
        check_device(device)
    except ModelError:
        return False
    return True


def check_dtype(dtype: str | torch.dtype) -> None:
    """Raise ModelError for a dtype other than ``auto`` and :data:`DTYPES`."""
    if dtype not in ("auto", *DTYPES, *(getattr(torch, kind) for kind in DTYPES)):
        raise ModelError(f"a dtype is auto, {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, not {dtype!r}")


def _fast_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware."""
    return any(present is True and name.endswith("bf16") for name, present in cpu_capabilities().items())


def cpu_capabilities() -> Mapping[str, Any]:
    """Return torch's dictionary of CPU features; empty on torch versions without it."""
    return getattr(torch.cpu, "get_capabilities", dict)()


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished its work, so that timings include it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def machine(device: str | None = None) -> str:
    """Return the machine and library versions, for reports; ``device`` as :func:`skipdecode.load` takes it."""
    device = default_device() if device is None else device
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{cpu_capabilities().get('cpu_name') or platform.machine()}, {torch.get_num_threads()} threads"
        name += "" if device.startswith("cpu") else f", {device}"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{name}; {versions}, Python {platform.python_version()}"
