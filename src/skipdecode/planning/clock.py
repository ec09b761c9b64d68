"""The clock of a job: its speed-up counts layers, or the seconds that a profile of this machine predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import UsageError
from ..weights.device import machine, placement
from .planner import CLOCKS, Predictor, workloads
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
    kind = config.dtype if kind == "auto" else kind
    profile.check(
        shape=shape_of(config),
        machine=machine(place),
        device=torch.device(place).type,
        dtype=str(kind).removeprefix("torch."),
        options=options,
    )


@dataclass(frozen=True)
class Clock:
    """What a job's speed-up counts: layers, or the seconds of decode steps or of the whole job.

    Args:
        name: ``layers``, ``step`` or ``job``.
        profile: measured by ``skipdecode profile`` on this machine, or its file; only for ``step`` and ``job``.

    Raises:
        UsageError: the name is unknown, or does not go with the profile.
        FileError: the file holds no profile.
    """

    name: str = "layers"
    profile: Profile | str | Path | None = None

    def __post_init__(self) -> None:
        if self.name not in CLOCKS:
            raise UsageError(f"a clock is {', '.join(CLOCKS)}, not {self.name!r}")
        if (self.name == "layers") != (self.profile is None):
            raise UsageError("the clocks step and job, and they only, need a profile: skipdecode profile measures one")
        if isinstance(self.profile, (str, Path)):
            object.__setattr__(self, "profile", Profile.load(self.profile))

    def check(self, config: Any, dtype: str, device: str | None, **options: Any) -> None:
        """Check the profile, if there is one, with :func:`check_profile`. Raises UsageError, ModelError."""
        if isinstance(self.profile, Profile):
            check_profile(self.profile, config, dtype, device, **options)

    def predictor(
        self, lengths: Sequence[int], batch_size: int | str, new_tokens: int, beams: int = 1
    ) -> Predictor | None:
        """Return a predictor for prompts of these lengths and ``new_tokens`` at most; None without profile or prompts.

        Raises UsageError for batches outside the profile, an automatic batch size, or beam search.
        """
        if not isinstance(self.profile, Profile) or not lengths:
            return None
        if not isinstance(batch_size, int):
            raise UsageError("a speed-up of the clock depends on the batch size: give a number, not auto")
        if beams > 1:
            raise UsageError("a profile knows rows without beams: give a speedup of layers, or num_beams=1")
        return Predictor(self.profile, workloads(lengths, batch_size, max(new_tokens, 2)), self.name)
