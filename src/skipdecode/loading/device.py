"""The device and dtype that a model runs in, and the machine that numbers are measured on."""

import math
import platform
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import transformers


def placement(config: Any, dtype: str | torch.dtype, device: str | None) -> tuple[str | torch.dtype, str]:
    """Dtype and device for a model with this config.

    Device None is an accelerator if there is one, else the CPU. Dtype ``auto`` becomes float32 on a CPU, unless the
    config says bfloat16 and the CPU multiplies it in hardware; on other devices it stays ``auto``.
    """
    device = default_device() if device is None else str(device)
    on_cpu = device.partition(":")[0] == "cpu"
    if dtype == "auto" and on_cpu and not (config.dtype == torch.bfloat16 and multiplies_bfloat16()):
        dtype = torch.float32
    return dtype, "cpu" if on_cpu else device


def default_device() -> str:
    """Type of the accelerator, if there is one, else ``cpu``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def multiplies_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware."""
    return any(present is True and name.endswith("bf16") for name, present in cpu_capabilities().items())


def gpu_has_bfloat16() -> bool:
    """Whether there is a CUDA GPU that multiplies bfloat16 in hardware."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def cpu_capabilities() -> dict[str, Any]:
    """Torch's dictionary of CPU features; empty for torch versions without it."""
    return getattr(torch.cpu, "get_capabilities", dict)()


def free_memory(device: str | torch.device) -> float:
    """Free bytes on a device; infinite if unknown."""
    device = torch.device(device)
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own, free again
        return torch.cuda.mem_get_info(device)[0] + cached
    with suppress(ImportError):
        import psutil

        return psutil.virtual_memory().available if device.type in ("cpu", "mps") else math.inf
    return math.inf


def watch_memory(device: torch.device) -> Callable[[], int]:
    """Function that returns the most bytes that tensors on a GPU took since this call; always 0 on other devices."""
    if device.type != "cuda":
        return lambda: 0
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    return lambda: torch.cuda.max_memory_allocated(device) - start


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished its work, so that timings include it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def machine(device: str | None = None) -> str:
    """Processor, threads and library versions, for reports."""
    device = default_device() if device is None else device
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{cpu_capabilities().get('cpu_name') or platform.machine()}, {torch.get_num_threads()} threads"
        name += "" if device.startswith("cpu") else f", {device}"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{name}; {versions}, Python {platform.python_version()}"
