"""Draw the figure of docs/how-it-works.md: `python tools/figures.py` writes docs/images/schedule.png."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch

from skipdecode import Schedule

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
STEPS = 64
COLORS = ("#e2e8f0", "#2563eb")


def draw_layers() -> None:
    """Which layers run at each step, at 3x of 24 layers."""
    schedule = Schedule.for_speedup(3, 24, horizon=STEPS, decay="linear")
    depths = [schedule.depth(step) for step in range(STEPS)]
    picture = torch.zeros(24, STEPS)
    for step, depth in enumerate(depths):
        picture[list(schedule.layers(depth)), step] = 1
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.imshow(picture, origin="lower", aspect="auto", cmap=ListedColormap(COLORS), interpolation="nearest")
    mean = sum(depths) / STEPS
    axes.set(xlabel="generated token fed back", ylabel="layer")
    axes.set_title(f"{mean:.1f} of 24 layers on average: {24 / mean:.2f}x fewer")
    names = ("passes the hidden states on", "runs")
    axes.legend(handles=[Patch(color=c, label=n) for c, n in zip(COLORS, names, strict=True)][::-1])
    figure.savefig(IMAGES / "schedule.png", dpi=110)


if __name__ == "__main__":
    draw_layers()
