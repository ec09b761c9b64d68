"""Measured times split into what a pass takes beyond its layers and in a layer of each kind."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..planning.profile import Pass, Profile, between

#: Layers of each kind that ran, and the seconds that a pass took.
Row = tuple[tuple[int, ...], float]


@dataclass(frozen=True)
class Timed:
    """The times of one call.

    Attributes:
        batch_size, length: rows, and positions of the prompt.
        passes: for each depth: layers of each kind that ran, positions attended, seconds of a pass.
        head: seconds of the head in a step.
    """

    batch_size: int
    length: int
    passes: tuple[tuple[tuple[int, ...], int, float], ...]
    head: float = 0.0


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


def split(size: int, cells: Mapping[int, Sequence[Row]]) -> tuple[list[Pass], list[float]]:
    """What passes of so many rows take at each length, and how far each measurement is off what the others say.

    A layer costs something else at each length. What is beyond layers (embedding, norm, head, sampling, loop) does not
    grow with the length to speak of, so that all lengths together say what it is.

    Args:
        size: rows.
        cells: length -> passes with several numbers of layers.
    """
    kinds = len(next(iter(cells.values()))[0][0])
    blank = (0,) * kinds
    rows = [
        ((*blank * place, *counts, *blank * (len(cells) - place - 1)), took)
        for place, measured in enumerate(cells.values())
        for counts, took in measured
    ]
    beyond, *layers = map(float, solve(rows))
    passes = [
        Pass(size, length, beyond, tuple(layers[kinds * place : kinds * (place + 1)]))
        for place, length in enumerate(cells)
    ]
    return passes, left_out(rows)


def fit_passes(timed: Sequence[Timed]) -> tuple[tuple[Pass, ...], float | None]:
    """The passes that were measured, and how far a measurement is off what the others say on average, as a share.

    The share is None where measurements are too few to say.
    """
    passes: list[Pass] = []
    off: list[float] = []
    for size in dict.fromkeys(each.batch_size for each in timed):
        cells: dict[int, list[tuple[tuple[int, ...], int, float]]] = {}
        for each in timed:
            if each.batch_size == size:
                cells.setdefault(each.length, []).extend(each.passes)
        middles = [round(statistics.mean(at for _, at, _ in rows)) for rows in cells.values()]
        rows = [[(counts, took) for counts, _, took in rows] for rows in cells.values()]
        found, errors = split(size, dict(zip(middles, rows, strict=True)))
        passes, off = passes + found, off + errors
    return tuple(passes), statistics.mean(off) if off else None


def fastest(calls: Sequence[Timed]) -> Timed:
    """The least of calls that did the same: what else a machine does only ever slows."""
    passes = tuple(
        (same[0][0], same[0][1], min(took for _, _, took in same))
        for same in zip(*(call.passes for call in calls), strict=True)
    )
    return replace(calls[0], passes=passes, head=min(call.head for call in calls))


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
