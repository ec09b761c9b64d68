"""List what an evaluation compares: methods at target speed-ups, and schedules from files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from ..model.config import DEFAULT_METHOD, UNTRAINED
from ..schedule import Schedule
from .methods import Method, get_method


@dataclass(frozen=True)
class Variant:
    """A method at one target speed-up on one checkpoint, which gives one row of the table.

    Attributes:
        method: the decoding method.
        speedup: the target.
        model: directory or hub name.
        key: unique name, used for the file of the table row.
        schedule: replaces the schedule that the method would choose.
        file: name of the file that ``schedule`` was read from.
        folder: name of the checkpoint's folder, where the method is compared on several.
    """

    method: Method
    speedup: float
    model: str
    key: str
    schedule: Schedule | None = None
    file: str | None = None
    folder: str = ""

    @property
    def label(self) -> str:
        """Return what the tables call it."""
        return self.file or self.method.label + (f", {self.folder}" if self.folder else "")


def variants(methods: str, model: str, speedups: Sequence[float], schedules: Sequence[Path] = ()) -> list[Variant]:
    """Return the variants that an evaluation compares, the full model first.

    Args:
        methods: comma-separated names, like ``skipdecode,d3,d3=DIR,static=DIR-{speedup}``. A method without ``=DIR``
            runs on ``model``; ``full=DIR`` makes DIR the full model to compare with. A method may stand several times,
            with other checkpoints.
        model: directory or hub name.
        speedups: targets of every method.
        schedules: JSON files of schedules to run on ``model``.

    Raises:
        UsageError: a method is unknown, named twice, or needs a checkpoint per speed-up and has none.
        ScheduleError, FileError: a file has no valid schedule.
    """
    parts = [part.strip().partition("=") for part in methods.split(",") if part.strip()]
    asked = [(get_method(name), checkpoint) for name, _, checkpoint in parts]
    full = next((checkpoint for method, checkpoint in asked if method.name == UNTRAINED and checkpoint), model)
    result = [Variant(get_method(UNTRAINED), 1.0, full, "full-1x")]
    for method, checkpoint in asked:
        if method.name == UNTRAINED:
            continue
        if method.model_per_speedup and "{speedup}" not in checkpoint:
            raise UsageError(f"{method.name} needs a checkpoint per speed-up: give {method.name}=DIR-{{speedup}}")
        several = [other for other, _ in asked].count(method) > 1
        folder = Path(checkpoint.replace("-{speedup}", "")).name if several else ""
        suffix = f"-{folder}" if folder else ""
        own_weights = method.fits_depths and checkpoint not in ("", full)  # then compare its full depth too
        result += [
            Variant(
                method,
                float(k),
                checkpoint.replace("{speedup}", f"{k:g}") or model,
                f"{method.name}-{k:g}x{suffix}",
                folder=folder,
            )
            for k in speedups
            if k > 1 or own_weights
        ]
    for path in schedules:
        schedule = Schedule.load(path)
        result.append(
            Variant(get_method(DEFAULT_METHOD), schedule.target, model, f"schedule-{path.stem}", schedule, path.name)
        )
    if len({variant.key for variant in result}) < len(result):
        raise UsageError(
            "a method or a schedule file is named twice: a method may stand once alone and once with each of several "
            "checkpoints, whose folders need different names, as schedule files do"
        )
    return result
