"""Draw the figures of docs/method.md: `python tools/figures.py` writes docs/images/schedule.png and fall.png."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import torch

from skipdecode import Schedule, SkipCache, load
from skipdecode.model.cache import total_kv_bytes
from skipdecode.model.cache_name import CACHE
from skipdecode.model.config import config_schedules

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


def draw_fall() -> None:
    """Left: shapes of the fall at 3x of layers. Right: bytes that the embedded checkpoint's caches hold, measured."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for decay in ("linear", "cosine", "exponential", "power", "step", "constant"):
        schedule = Schedule.for_speedup(3, 24, horizon=STEPS, decay=decay)
        left.step(range(STEPS), [schedule.depth(g) for g in range(STEPS)], where="post", label=decay)
    left.set(xlabel="generated token fed back", ylabel="layers run, of 24", ylim=(0, None))
    left.legend()
    model, tokenizer = load("demo")
    for speedup in (1, 2, 3, 5):
        right.plot(_held(model, tokenizer, speedup), label=f"{speedup}x")
    right.set(xlabel="generated token fed back", ylabel="keys and values held, kB", ylim=(0, None))
    right.legend()
    figure.savefig(IMAGES / "fall.png", dpi=110)


@torch.no_grad()
def _held(model: Any, tokenizer: Any, speedup: float) -> list[float]:
    """Return the kilobytes of keys and values after each step of one text."""
    cache = SkipCache(model, config_schedules(model.config)[speedup])
    ids, held = tokenizer("name Zizzi, food English ->", return_tensors="pt").input_ids, []
    for _ in range(STEPS):
        ids = model(ids, use_cache=True, **{CACHE: cache}).logits[:, -1:].argmax(-1)
        held.append(total_kv_bytes(cache) / 1e3)
    return held


if __name__ == "__main__":
    draw_layers()
    draw_fall()
