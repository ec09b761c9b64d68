"""Draw the picture of ``skipdecode demo``."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import matplotlib

from ..clock.timing import Timing
from ..core.schedule import Schedule
from ..errors import UsageError
from ..files import check_target, write

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def check_picture(path: Path) -> None:
    """Raise FileError if ``path`` cannot be written, UsageError if its suffix is not that of an image format."""
    check_target(path)
    kinds = plt.Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise UsageError(f"{path} does not end like a picture: .png, .pdf or .svg, say")


def draw_demo(schedules: Mapping[float, Schedule], timings: Mapping[float, Timing], path: Path, note: str) -> None:
    """Draw each schedule's depth by step, and its measured ratios against the target; ``note`` is in small print."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    steps = max(max(t.result.lengths) for t in timings.values())
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
    right.plot(targets, ratios, "o-", color="#334155", label="a decode step: fewer layers by")
    right.plot(targets, decode, "s-", color="#2563eb", label="a decode step: faster by (clock)")
    right.plot(targets, total, "^-", color="#f59e0b", label="the job, prompt included: faster by (clock)")
    right.set(xlabel="target speed-up", ylabel="times less than at 1x", xticks=targets)
    right.set_title("what it gave")
    right.legend()
    figure.suptitle(note, fontsize=8, color="grey")
    content = io.BytesIO()
    figure.savefig(content, dpi=140, format=path.suffix.removeprefix(".").lower())
    plt.close(figure)
    write(path, content.getvalue())
