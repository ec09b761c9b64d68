"""Check that a profile was measured on this machine, for this model."""

from __future__ import annotations

from typing import Any

import torch

from ..loading.device import machine, placement
from .profile import Profile, shape_of


def check_profile(
    profile: Profile, config: Any, dtype: str = "auto", device: str | None = None, **options: Any
) -> None:
    """Check that a profile was measured on this machine, for this config, dtype, device and loading options.

    Raises:
        UsageError: something differs; the message says what.
        ModelError: the device does not exist.
    """
    kind, place = placement(config, dtype, device)
    kind = config.dtype if kind == "auto" else kind  # None: only the weights tell
    profile.check(
        shape=shape_of(config),
        machine=machine(place),
        device=torch.device(place).type,
        dtype=None if kind is None else str(kind).removeprefix("torch."),
        options=options,
    )
