"""How many bytes of keys, values and states a cache holds: of one layer, and of all that a schedule runs. Pure Python.

The bytes of one position are measured on the model (``generation/batch_size.py``); the rest is counted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.schedule import Schedule
from .fitting import fall


@dataclass(frozen=True)
class LayerKV:
    """What one layer keeps for a row.

    Attributes:
        fixed: bytes whatever the length: states of recurrences and convolutions.
        per_position: bytes of the keys and values of a position.
        window: of a sliding layer, which keeps one position less than its window; None of others.
        room: positions ahead for which a growing layer has memory each time it has to move.
    """

    fixed: float = 0.0
    per_position: float = 0.0
    window: int | None = None
    room: int = 0

    def at(self, prompt: int, positions: int) -> float:
        """Bytes after ``positions``, the first ``prompt`` of which came in one pass."""
        return self.fixed + self.per_position * positions_stored(prompt, positions, self.window, self.room)


def positions_stored(prompt: int, positions: int, window: int | None, room: int) -> int:
    """Positions that a layer has memory for; the arguments are those of :class:`LayerBytes` and its ``at``."""
    if window is not None:
        return min(positions, window - 1)
    if not room:
        return positions
    # The first position beyond the room moves the layer to where there is room for as many again.
    moves = -(-max(positions - prompt - room, 0) // (room + 1))
    return prompt + room + moves * (room + 1)


def peak_kv_bytes(layers: Sequence[LayerKV], schedule: Schedule, prompt: int, steps: int) -> float:
    """The most bytes that a row's cache holds at once: what ``SkipCache.peak_kv_bytes`` will be, without beams.

    Args:
        layers: what each layer keeps.
        schedule: which of them run.
        prompt, steps: tokens of the prompt, padding included, and decode steps after it.
    """

    def held(depth: int, step: int) -> dict[int, float]:
        return {layer: layers[layer].at(prompt, prompt + step + 1) for layer in schedule.layers(depth)}

    # Layers store one after the other; one that the next step does not run is freed when it has run.
    keep = schedule.layers(schedule.depth(0))
    now = most = 0.0
    for layer, count in enumerate(schedule.positions_per_layer(prompt, prompt)):
        stored = layers[layer].at(count, count) if count else 0.0
        most = max(most, now + stored)
        now += stored if layer in keep else 0.0
    # Bytes only grow while the depth stays: the moments of most are the prompt, falls and the last step.
    falls = {fall(schedule, depth) - 1 for depth in range(schedule.min_depth + 1, schedule.max_depth + 1)}
    for step in sorted(step for step in {*falls, steps - 1} if 0 <= step < steps):
        before, after = (held(schedule.depth(step), since) for since in (step - 1, step))
        keep, now = schedule.layers(schedule.depth(step + 1)), sum(before.values())
        for layer in sorted(before):
            now += after[layer] - before[layer]
            most = max(most, now)
            now -= 0.0 if layer in keep else after[layer]
    return most
