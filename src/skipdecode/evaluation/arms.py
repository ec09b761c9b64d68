"""What is compared: methods at target speed-ups, and schedules from files, each on its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.checkpoint_config import DEFAULT_METHOD, UNTRAINED, schedule_for
from ..core.schedule import Schedule
from ..errors import UsageError
from ..methods import Method, get_method
from ..weights.loading import read_config


@dataclass(frozen=True)
class Arm:
    """One row to come: a method at one target speed-up, on one checkpoint.

    Attributes:
        method: how it decodes.
        speedup: the target.
        model: directory or hub name.
        key: names the file of its row.
        schedule: runs in place of the method's own choice.
        file: names the schedule: the file that it was read from, or ``flat``.
    """

    method: Method
    speedup: float
    model: str
    key: str
    schedule: Schedule | None = None
    file: str | None = None

    @property
    def name(self) -> str:
        """What the row is of: the method's name, or the schedule file's."""
        return self.file or self.method.name

    @property
    def label(self) -> str:
        """The name for people."""
        return self.file or self.method.label

    def identity(self) -> dict[str, Any]:
        """What makes it what it is, in plain values."""
        values = {"method": self.method.name, "speedup": self.speedup, "model": self.model, "key": self.key}
        return values | ({"schedule": self.schedule.to_dict()} if self.schedule else {})


def arms(
    methods: str, model: str, speedups: Sequence[float], schedules: Sequence[Path] = (), serving: bool = False
) -> list[Arm]:
    """The arms of an evaluation; the full model comes first, once.

    Args:
        methods: names with commas between, like ``skipdecode,d3,d3=DIR,static=DIR-{speedup}``. A method without a
            checkpoint of its own runs on ``model``; ``full=DIR`` is another full model to compare with.
        model: directory or hub name.
        speedups: targets of every method.
        schedules: JSON files, each of which becomes an arm on ``model``.
        serving: whether ``model`` also runs a flat schedule for each speed-up above 1.

    Raises:
        UsageError: no method of this name, an arm that is named twice, or a method that needs a checkpoint per
            speed-up and is not given one.
        ScheduleError, FileError: a file that holds no schedule, or a speed-up that the model has not the layers for.
    """
    parts = [part.strip().partition("=") for part in methods.split(",") if part.strip()]
    asked = [(get_method(name), checkpoint) for name, _, checkpoint in parts]
    full = next((checkpoint for method, checkpoint in asked if method.name == UNTRAINED and checkpoint), model)
    result = [Arm(get_method(UNTRAINED), 1.0, full, "full-1x")]
    for method, checkpoint in asked:
        if method.name != UNTRAINED:
            twice = [other for other, _ in asked].count(method) > 1
            result += _of_method(method, checkpoint, model, full, speedups, "-trained" if twice and checkpoint else "")
    for speedup in speedups if serving else ():
        if speedup > 1:
            flat = schedule_for(read_config(model), speedup, decay="constant")
            if flat != schedule_for(read_config(model), speedup):  # or the checkpoint was trained so
                result.append(Arm(get_method(DEFAULT_METHOD), speedup, model, f"flat-{speedup:g}x", flat, "flat"))
    for path in schedules:
        schedule = Schedule.load(path)
        result.append(
            Arm(get_method(DEFAULT_METHOD), schedule.target, model, f"schedule-{path.stem}", schedule, path.name)
        )
    if len({arm.key for arm in result}) < len(result):
        raise UsageError(
            "a method or a schedule file is named twice: a method may stand once alone and once with a checkpoint, and "
            "schedule files need different names"
        )
    return result


def _of_method(
    method: Method, checkpoint: str, model: str, full: str, speedups: Sequence[float], suffix: str
) -> list[Arm]:
    """A row per speed-up. At 1x a method is the full model, unless it has weights of its own to run in full."""
    if method.model_per_speedup and "{speedup}" not in checkpoint:
        raise UsageError(f"{method.name} needs a checkpoint per speed-up: give {method.name}=DIR-{{speedup}}")
    own_full_depth = method.fits_depths and checkpoint not in ("", full)
    return [
        Arm(method, float(k), checkpoint.replace("{speedup}", f"{k:g}") or model, f"{method.name}-{k:g}x{suffix}")
        for k in speedups
        if k > 1 or own_full_depth
    ]
