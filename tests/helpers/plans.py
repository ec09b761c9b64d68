"""Schedules of eight layers with whatever a schedule can have, and plans of steps that mix them."""

from __future__ import annotations

from typing import Any

import numpy as np

from skipdecode import Schedule
from skipdecode.serving.steps import DepthTables, StepPlan

LAYERS = 8
SCHEDULES = {
    1.0: Schedule.full(LAYERS),
    2.0: Schedule(LAYERS, 6, 2, horizon=9),
    3.0: Schedule(LAYERS, 3, 2, horizon=4, prompt_decay=3, order="bottom"),
    4.0: Schedule(LAYERS, 2, 2, horizon=1, decay="constant", prompt_layers="max", order=(3, 1, 0, 2, 4, 5, 6, 7)),
}
#: (speed-up, prompt length, tokens before, tokens in the step) of each request.
Requests = list[tuple[float, int, int, int]]


def plan(requests: Requests, tables: DepthTables | None = None) -> StepPlan:
    """The plan of a step of these requests."""
    tables = tables or DepthTables(SCHEDULES)
    speedups, prompts, computed, counts = zip(*requests, strict=True)
    arrays: list[Any] = [np.array(values, dtype=np.int32) for values in (counts, computed, prompts)]
    return tables.step([tables.of(speedup) for speedup in speedups], *arrays)
