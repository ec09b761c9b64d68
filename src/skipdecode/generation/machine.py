"""The machine and versions that numbers are of, and the memory in use."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

import torch
import transformers

from ..core.cost import Profile, shape_of
from .loading import cpu_capabilities, placement
from .peaks import measure_peaks

#: A machine whose peaks are so many times those of a profile's day, or so much less, is not as it was. Shared machines
#: drift by a quarter within the hour, which full depth and budgets share for the greater part.
DRIFT = 1.5


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


def doubts(profile: Profile) -> list[str]:
    """What must be said before a profile decides what runs here: it contradicts itself, or this machine has changed.

    The same name does not make it the same machine: its peaks are measured anew, in a second or two, where the profile
    says what they were.
    """
    found = [profile.doubt] if profile.doubt else []
    if profile.peaks and profile.machine == machine(profile.device):
        now = asdict(measure_peaks(torch.device(profile.device), getattr(torch, profile.dtype), rounds=2))
        ratios = {name: now[name] / then for name, then in profile.peaks.items()}
        if max(ratios.values()) > DRIFT or min(ratios.values()) < 1 / DRIFT:
            shares = ", ".join(f"{name} {ratio:.0%}" for name, ratio in ratios.items())
            found.append(
                f"this machine's peaks are not those of the profile's day ({shares} of them): something else computes "
                "now, or did then, or it is another machine of that name; measure again: skipdecode profile"
            )
    return found


def resident_bytes() -> int:
    """Memory of this process that is in RAM now; 0 where psutil is not installed."""
    try:
        import psutil
    except ImportError:
        return 0
    return int(psutil.Process().memory_info().rss)
