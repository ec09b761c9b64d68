"""What is compared: methods at target speed-ups, and schedules from files, each on its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.checkpoint_config import DEFAULT_METHOD, UNTRAINED
from ..core.schedule import Schedule
from ..errors import UsageError
from ..methods import Method, get_method


@dataclass(frozen=True)
class Variant:
    """A method at one target speed-up, on one checkpoint: one row of the table.

    Attributes:
        method: how it decodes.
        speedup: the target.
        model: directory or hub name.
        key: names the file of its row.
        schedule: runs in place of the method's own choice.
        file: the name of the file that ``schedule`` was read from.
    """

    method: Method
    speedup: float
    model: str
    key: str
    schedule: Schedule | None = None
    file: str | None = None

    @property
    def name(self) -> str:
        """The method's name, or the schedule file's."""
        return self.file or self.method.name

    @property
    def label(self) -> str:
        """The name for people."""
        return self.file or self.method.label

    def identity(self) -> dict[str, Any]:
        """Everything that distinguishes it, in plain values."""
        values = {"method": self.method.name, "speedup": self.speedup, "model": self.model, "key": self.key}
        return values | ({"schedule": self.schedule.to_dict()} if self.schedule else {})


def variants(methods: str, model: str, speedups: Sequence[float], schedules: Sequence[Path] = ()) -> list[Variant]:
    """List what an evaluation compares; the full model comes first, once.

    Args:
        methods: names with commas between, like ``skipdecode,d3,d3=DIR,static=DIR-{speedup}``. A method without a
            checkpoint of its own runs on ``model``; ``full=DIR`` is another full model to compare with.
        model: directory or hub name.
        speedups: targets of every method.
        schedules: JSON files, each of which runs on ``model``.

    Raises:
        UsageError: no method of this name, one that is named twice, or a method that needs a checkpoint per speed-up
            and is not given one.
        ScheduleError, FileError: a file that holds no schedule.
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
        twice = [other for other, _ in asked].count(method) > 1
        suffix = "-trained" if twice and checkpoint else ""
        own_weights = method.fits_depths and checkpoint not in ("", full)  # whose full depth is a row too
        result += [
            Variant(
                method, float(k), checkpoint.replace("{speedup}", f"{k:g}") or model, f"{method.name}-{k:g}x{suffix}"
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
            "a method or a schedule file is named twice: a method may stand once alone and once with a checkpoint, and "
            "schedule files need different names"
        )
    return result
