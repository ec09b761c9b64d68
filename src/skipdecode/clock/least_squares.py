"""Measured times split into what a pass takes beyond its layers and in a layer of each kind."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from ..core.cost import Pass, Profile, between

#: Layers of each kind that ran, and the seconds that a pass took.
Row = tuple[tuple[int, ...], float]


def solve(rows: Sequence[Row]) -> np.ndarray:
    """Seconds beyond layers and of a layer of each kind, by least squares of relative errors."""
    left, right = np.array([[1.0, *counts] for counts, _ in rows]), np.array([took for _, took in rows])
    left = left / right[:, None]
    kept = np.arange(left.shape[1])
    while True:  # what noise makes negative is nothing, and the others are fitted without it
        found, *_ = np.linalg.lstsq(left[:, kept], np.ones(len(right)), rcond=None)
        if found.min(initial=0.0) >= 0:
            break
        kept = np.delete(kept, found.argmin())
    solution = np.zeros(left.shape[1])
    solution[kept] = found
    return solution


def split(size: int, length: int, rows: Sequence[Row]) -> Pass:
    """What a pass of so many rows and positions takes, from passes with several numbers of layers."""
    beyond, *layers = map(float, solve(rows))
    return Pass(size, length, beyond, tuple(layers))


def left_out(rows: Sequence[Row]) -> list[float]:
    """How far each row is off what the others say, as a share; nothing if they are too few to say."""
    if len(rows) < len(rows[0][0]) + 3:
        return []
    solutions = (solve([*rows[:i], *rows[i + 1 :]]) for i in range(len(rows)))
    return [abs(float([1.0, *counts] @ x) / took - 1) for (counts, took), x in zip(rows, solutions, strict=True)]


def off_the_line(profile: Profile, which: str) -> float | None:
    """How far passes at full depth are off the line between their neighbours in length, on average; None of too few."""
    measured: Sequence[Pass] = getattr(profile, which)
    off = []
    for before, one, after in zip(measured, measured[1:], measured[2:], strict=False):
        if before.batch_size == one.batch_size == after.batch_size:
            line = between([before, after], which)(one.batch_size, one.length)
            off.append(abs(whole(line, profile) / whole(one, profile) - 1))
    return statistics.mean(off) if off else None


def whole(one: Pass, profile: Profile) -> float:
    """Seconds of the pass with all layers."""
    return one.beyond + sum(one.layers[kind] for kind in profile.layers)
