"""The machine's clock for a job: what its batches will take, so that a speed-up can be one of seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import UsageError
from ..weights.device import machine, measure_peaks, placement
from .planner import CLOCKS, Predictor, workloads
from .profile import Profile, shape_of

#: A machine whose peaks are so many times those of a profile's day, or so much less, is not as it was. Shared machines
#: drift by a quarter within the hour, which full depth and budgets share for the greater part.
DRIFT = 1.5


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


def warnings_of(profile: Profile) -> list[str]:
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


@dataclass(frozen=True)
class ClockOf:
    """What a job's speed-up is of.

    Args:
        name: ``layers``, ``step`` or ``job``.
        profile: what ``skipdecode profile`` measured here, or its file; the last two need one.

    Raises:
        UsageError: another name, or no profile where one is needed.
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
        """Whether the profile is this machine's, for models of this config. Raises UsageError."""
        if isinstance(self.profile, Profile):
            check_profile(self.profile, config, dtype, device, **options)

    def warnings(self) -> list[str]:
        """What a user should know of the profile; a second or two."""
        return warnings_of(self.profile) if isinstance(self.profile, Profile) else []

    def predictor(
        self, lengths: Sequence[int], batch_size: int | str, new_tokens: int, beams: int = 1
    ) -> Predictor | None:
        """Of rows with prompts of these lengths that write ``new_tokens`` each at most; None where layers count.

        Raises UsageError: batches that the profile does not reach, or whose size is not known beforehand.
        """
        if not isinstance(self.profile, Profile) or not lengths:
            return None
        if not isinstance(batch_size, int):
            raise UsageError("a speed-up of the clock depends on the batch size: give a number, not auto")
        if beams > 1:
            raise UsageError("a profile knows rows without beams: give a speedup of layers, or num_beams=1")
        return Predictor(self.profile, workloads(lengths, batch_size, max(new_tokens, 2)), self.name)
