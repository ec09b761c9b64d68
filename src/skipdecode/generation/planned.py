"""The machine's clock for a job: what its batches will take, so that a speed-up can be one of seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.cost import Profile
from ..core.planning import CLOCKS, Predictor, workloads
from ..errors import UsageError
from .machine import check_profile, doubts


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

    def doubts(self) -> list[str]:
        """What a user should know of the profile; a second or two."""
        return doubts(self.profile) if isinstance(self.profile, Profile) else []

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
