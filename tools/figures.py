"""Draw the figures of README.md and docs/: `python tools/figures.py` writes docs/images/."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import torch

from skipdecode import Schedule

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
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


def draw_speeds() -> None:
    """What README's table says of each speed."""
    rows = json.loads((ROOT / "results" / "smollm2-people" / "table.json").read_text(encoding="utf-8"))["rows"]
    speeds = [f"{row['target']:g}x" for row in rows]
    panels = {
        "layers per token": ("step_layers", "{:g}"),
        "same next token": ("top_1", "{:.0f}%"),
        "KL": ("kl", "{:.2f}"),
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(9, 2.2), layout="constrained")
    for panel, (title, (key, form)) in zip(axes, panels.items(), strict=True):
        bars = panel.barh(speeds, [row[key] for row in rows], color=COLORS[1])
        panel.bar_label(bars, [form.format(row[key]) for row in rows], padding=3)
        panel.set_title(title, fontsize=11)
        panel.margins(x=0.2)
        panel.invert_yaxis()
        panel.xaxis.set_visible(False)
        panel.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(IMAGES / "speeds.png", dpi=110)


def draw_tokens() -> None:
    """How far two forms of an adapter are from the full model by the tokens that they learned from."""
    curve = json.loads((ROOT / "results" / "gpu_distill" / "table.json").read_text(encoding="utf-8"))["curve"]
    forms = {"bypasses and bottlenecks": ("low", "off"), "… and weights of its own": ("all",)}
    figure, panels = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    for panel, speedup in zip(panels, ("1.5", "2"), strict=True):
        for (label, arms), color in zip(forms.items(), ("#2563eb", "#ea580c"), strict=True):
            rows = [row for row in curve if row["arm"] in arms and row["tokens"]]
            panel.plot([row["tokens"] / 1e6 for row in rows], [row[f"people {speedup}"][0] for row in rows], "o-")
            panel.lines[-1].set(color=color, label=label)
        panel.set(title=f"{speedup}x", xlabel="million tokens learned from", ylabel="KL, nats a token", xscale="log")
        panel.set_xticks([0.5, 1, 2, 4, 8, 14], labels=["0.5", "1", "2", "4", "8", "14"])
        panel.minorticks_off()
    panels[1].legend(frameon=False)
    figure.savefig(IMAGES / "tokens.png", dpi=110)


def draw_load() -> None:
    """Time per output token of three servers, by the requests a second that they finish."""
    found = json.loads((ROOT / "results" / "serving" / "smollm2-load" / "table.json").read_text(encoding="utf-8"))
    names = {"stock": ("stock vLLM", "#64748b"), "1": ("1x", "#ea580c"), "1-2": ("1x, 2x under load", "#2563eb")}
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for engine, (label, color) in names.items():
        rows = [row for row in found["rows"] if row["engine"] == engine]
        axes.plot([row["request_throughput"] for row in rows], [row["median_tpot_ms"] for row in rows], "o-")
        axes.lines[-1].set(color=color, label=label)
    axes.set(xlabel="requests finished a second", ylabel="time per output token, ms", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(IMAGES / "load.png", dpi=110)


if __name__ == "__main__":
    draw_layers()
    draw_speeds()
    draw_tokens()
    draw_load()
