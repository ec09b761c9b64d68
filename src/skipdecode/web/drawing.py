"""Draw what the page shows: texts with their differences marked, and layers against positions."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from html import escape
from itertools import groupby

from ..schedule import Schedule
from .writing import Written

#: Of the picture, in its own units: height of a layer, width of the prompt.
LAYER, PROMPT = 4, 24


def marked(text: str, other: str) -> str:
    """Return ``text`` as HTML, with the words marked that are not those of ``other``, as far as both go."""
    words, others = text.split(" "), other.split(" ")
    both = min(len(words), len(others))
    same = difflib.SequenceMatcher(None, others[: both + 1], words[:both], autojunk=False)
    parts = []
    for kind, _, _, start, end in same.get_opcodes():
        if start < end:
            part = escape(" ".join(words[start:end]))
            parts.append(part if kind == "equal" else f"<mark>{part}</mark>")
    return " ".join([*parts, *map(escape, words[both:])])


def figures(written: Written, schedule: Schedule) -> str:
    """Return a line of figures: tokens, tokens per second, layers per step, bytes of keys and values."""
    steps = written.depths
    depth = sum(steps) / len(steps) if steps else schedule.num_layers
    kinds = (
        f"{written.tokens} tokens",
        f"{written.tokens_per_second:.1f} tokens/s",
        f"{depth:.1f} of {schedule.num_layers} layers a step",
        f"{written.kv_bytes / 1e6:.1f} MB of keys and values",
    )
    return "".join(f"<span>{kind}</span>" for kind in kinds)


def picture(schedule: Schedule, prompt: int, depths: Sequence[int], most: int) -> str:
    """Return an SVG of the layers (the lowest below) that the prompt and each decode step so far ran.

    Args:
        schedule: says which layers a depth runs.
        prompt: its length in tokens; it is drawn as wide whatever its length, each layer as far as it ran.
        depths: layers that each step ran.
        most: steps that the picture has room for.
    """
    layers = schedule.num_layers
    width, height = PROMPT + 2 + max(most, 1), layers * LAYER
    share = schedule.positions_per_layer(prompt, prompt)
    boxes = [_box(0, layer, PROMPT * share[layer] / max(prompt, 1), 1, layers, "prompt") for layer in range(layers)]
    start = 0
    for depth, steps in groupby(depths):
        length = len([*steps])
        ran = schedule.layers(depth)
        for _, stretch in groupby(enumerate(ran), lambda pair: pair[1] - pair[0]):
            run = [layer for _, layer in stretch]
            boxes.append(_box(PROMPT + 2 + start, run[0], length, len(run), layers, "step"))
        start += length
    said = f"layers run by the prompt and {len(depths)} decode steps, of {layers}"
    return (
        f'<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img" aria-label="{said}">'
        f'<rect class="room" width="{width}" height="{height}"/>{"".join(boxes)}</svg>'
    )


def _box(x: float, layer: int, width: float, count: int, layers: int, kind: str) -> str:
    y = (layers - layer - count) * LAYER
    return f'<rect class="{kind}" x="{x:g}" y="{y}" width="{width:g}" height="{count * LAYER}"/>' if width else ""
