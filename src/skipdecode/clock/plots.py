"""Pictures of the clock: what was asked for and what is got, planned or measured."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from ..errors import MissingExtra
from ..files import write

try:
    import matplotlib
except ImportError:
    raise MissingExtra("plots need matplotlib: pip install 'skipdecode[cli]'") from None

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = ("#2563eb", "#db2777", "#059669", "#d97706", "#7c3aed", "#475569")


def draw_ratios(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Asked against got, in two panels: a decode step's speed-up and a job's. Predictions are hollow.

    Args:
        rows: as ``bench`` and ``plan`` make them: ``batch_size``, ``asked``, and ratios that are there or not.
        path: the picture.
        title: of the whole.
    """
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained", sharex=True, sharey=True)
    rows = [row for row in rows if "refused" not in row]
    most = max(row["asked"] for row in rows)
    for axes, of in zip(panels, ("step", "job"), strict=True):
        axes.plot([1, most], [1, most], color="#94a3b8", linewidth=1, linestyle=":", label="as asked")
        for colour, size in zip(cycle(COLOURS), dict.fromkeys(row["batch_size"] for row in rows), strict=False):
            own = sorted((row for row in rows if row["batch_size"] == size), key=lambda row: row["asked"])
            for name, filled in ((f"predicted_{of}_ratio", False), (f"{of}_ratio", True)):
                points = [(row["asked"], row[name]) for row in own if name in row]
                if points:
                    face = colour if filled else "white"
                    label = f"batch {size}" + ("" if filled else ", predicted")
                    style = "-" if filled else "--"
                    axes.plot(*zip(*points, strict=True), style, marker="o", color=colour, mfc=face, label=label)
        axes.set_xlabel(f"speed-up asked for, of {rows[0]['asked_of']}")
        axes.set_title("a decode step" if of == "step" else "the job: prompt and decode steps")
        axes.grid(color="#e2e8f0")
    panels[0].set_ylabel("times faster than full depth")
    panels[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    content = io.BytesIO()
    figure.savefig(content, dpi=140, format=path.suffix.removeprefix(".").lower() or "png")
    plt.close(figure)
    write(path, content.getvalue())
