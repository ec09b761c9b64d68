"""Pictures: a schedule as a staircase, and what it trades."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from .benchmark import Timing
from .schedule import Schedule

FULL, RUN, SKIP = "#334155", "#2563eb", "#e2e8f0"


def draw_schedule(schedule: Schedule, path: Path, length: int | None = None) -> None:
    """Which layers run at each step: the picture of ``skipdecode schedule``."""
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    length = length or schedule.horizon + max(schedule.horizon // 4, 2)
    _grid(axes, schedule, length)
    ratio = schedule.layer_ratio(length)
    axes.set_title(
        f"{schedule.average_depth(length):.1f} of {schedule.num_layers} layers on average: {ratio:.2f}x fewer"
    )
    figure.savefig(path, dpi=140)
    plt.close(figure)


def draw_demo(schedules: Mapping[float, Schedule], timings: Mapping[float, Timing], path: Path, note: str) -> None:
    """The staircases of all speeds, and target against layers and clock."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    steps = max(t.cost.steps for t in timings.values())
    for speedup, schedule in schedules.items():
        left.step(range(steps), [schedule.depth(g) for g in range(steps)], where="post", label=f"{speedup:g}x", lw=2)
    left.set(
        xlabel="generated token fed back", ylabel="layers run", ylim=(0, next(iter(schedules.values())).num_layers + 1)
    )
    left.set_title("the staircase")
    left.legend(title="target")
    base = timings[min(timings)]
    targets = list(timings)
    ratios = [t.cost.layer_ratio for t in timings.values()]
    decode = [base.step_ms / t.step_ms for t in timings.values()]
    total = [base.seconds / t.seconds for t in timings.values()]
    right.plot(targets, targets, ":", color="grey", label="target")
    right.plot(targets, ratios, "o-", color=FULL, label="layers: fewer by")
    right.plot(targets, decode, "s-", color=RUN, label="clock: a decode step")
    right.plot(targets, total, "^-", color="#f59e0b", label="clock: all, prompt included")
    right.set(xlabel="target speed-up", ylabel="times faster than 1x", xticks=targets)
    right.set_title("what it gave")
    right.legend()
    figure.suptitle(note, fontsize=8, color="grey")
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _grid(axes: Axes, schedule: Schedule, length: int) -> None:
    running = [set(schedule.layers(schedule.depth(step))) for step in range(length)]
    image = [[int(layer in layers) for layers in running] for layer in range(schedule.num_layers)]
    colors: Any = matplotlib.colors.ListedColormap([SKIP, RUN])
    axes.imshow(image, origin="lower", aspect="auto", cmap=colors, vmin=0, vmax=1, interpolation="nearest")
    axes.set(xlabel="generated token fed back", ylabel="layer")
    patches = [Patch(color=RUN, label="runs"), Patch(color=SKIP, label="passes the hidden states on")]
    axes.legend(handles=patches, loc="center")
