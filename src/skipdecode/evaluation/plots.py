"""Draw the pictures of ``skipdecode demo`` and ``skipdecode evaluate``."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from ..errors import UsageError
from ..files import check_target, write
from ..latency.timing import Timing
from ..schedule import Schedule

matplotlib.use("Agg")
import matplotlib.pyplot as plt

#: Formats that have a title, which tells our pictures from others.
FORMATS, TITLE = (".png", ".pdf", ".svg"), "made by skipdecode"


def check_picture(path: Path) -> None:
    """Raise FileError if a file at ``path`` is no picture of ours, UsageError if its suffix is not in ``FORMATS``."""
    check_target(path, may_replace=lambda content: TITLE.encode() in content)
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path} does not end like a picture: {', '.join(FORMATS)}")


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
    base, targets, measured = timings[min(timings)], list(timings), timings.values()
    right.plot(targets, targets, ":", color="grey", label="target")
    right.plot(targets, [t.stats.layer_ratio for t in measured], "o-", label="a decode step: fewer layers by")
    right.plot(targets, [base.step_ms / t.step_ms for t in measured], "s-", label="a decode step: faster by (clock)")
    label = "the job, prompt included: faster by (clock)"
    right.plot(targets, [base.seconds / t.seconds for t in measured], "^-", label=label)
    right.set(xlabel="target speed-up", ylabel="times less than at 1x", xticks=targets)
    right.set_title("what it gave")
    right.legend()
    figure.suptitle(note, fontsize=8, color="grey")
    _save(figure, path)


def draw_tradeoff(rows: Sequence[Mapping[str, Any]], metrics: Sequence[tuple[str, str]], path: Path) -> None:
    """Draw each metric (key, label) of an evaluation's rows, the full model's first, against the job's clock ratio."""
    figure, panels = plt.subplots(1, len(metrics), figsize=(6 * len(metrics), 4), layout="constrained", squeeze=False)
    for (metric, label), panel in zip(metrics, panels[0], strict=True):
        for name in dict.fromkeys(row["label"] for row in rows):
            points = sorted((row["job_clock_ratio"], row[metric]) for row in rows if row["label"] == name)
            panel.plot(*zip(*points, strict=True), "o-", label=name)
        panel.axhline(rows[0][metric], color="grey", lw=0.8, ls=":")
        panel.set(xlabel="the job, prompt and decode steps: times faster (wall clock)", ylabel=label)
    panels[0][0].legend(fontsize=8)
    _save(figure, path)


def draw_probe(found: Any, path: Path) -> None:
    """Draw the distance from full depth, bare and with stand-ins, by the speed-up of layers, or of a profile's step."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, label, mark in (("bare", "bare skipping", "x"), ("stand_ins", "with maps in their place", "o")):
        points = [(each.step_clock or each.speedup, getattr(each, name).kl) for each in found.tried]
        color = axes.plot(*zip(*points, strict=True), mark, alpha=0.4)[0].get_color()
        best = dict(sorted(zip((each.speedup for each in found.tried), points, strict=True), key=lambda x: -x[1][1]))
        axes.plot(*zip(*sorted(best.values()), strict=True), "-", color=color, label=f"{label}: the best layers")
    by = f"a decode step of {found.batch_size} texts is faster by" if found.batch_size else "fewer layers by"
    axes.set(xlabel=by, ylabel="KL from full depth (nats per token)", ylim=(0, None))
    axes.set_title(f"{found.model}, without training")
    axes.legend()
    _save(figure, path)


def _save(figure: plt.Figure, path: Path) -> None:
    content = io.BytesIO()
    figure.savefig(content, dpi=140, format=path.suffix.removeprefix(".").lower(), metadata={"Title": TITLE})
    plt.close(figure)
    write(path, content.getvalue())
