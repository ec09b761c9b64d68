"""What the clock says: runs timed alternately, so that whatever else the machine does hits all of them alike."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import transformers

from .generation import Cost, Generated
from .loading import cpu_capabilities

Name = TypeVar("Name", str, float)


@dataclass(frozen=True)
class Timing:
    """One run's texts and cost, and the medians over its repeats, in seconds."""

    result: Generated
    seconds: float
    decode_seconds: float

    @property
    def step_ms(self) -> float:
        """Milliseconds per decode step: comparable where budgets write texts of different length."""
        return 1e3 * self.decode_seconds / max(self.cost.steps, 1)

    @property
    def cost(self) -> Cost:
        """Layers, tokens and bytes: the same in every repeat."""
        return self.result.cost


def alternate(
    runs: Mapping[Name, Callable[[], Generated]], repeats: int, on_run: Callable[[], object] | None = None
) -> dict[Name, Timing]:
    """Time every run once per round, ``repeats`` rounds after one unmeasured round to warm up."""
    results: dict[Name, list[Generated]] = {name: [] for name in runs}
    for round_ in range(repeats + 1):
        for name, run in runs.items():
            result = run()
            if round_ > 0:
                results[name].append(result)
            if on_run:
                on_run()
    return {
        name: Timing(
            many[-1],
            statistics.median(r.cost.seconds for r in many),
            statistics.median(r.cost.decode_seconds for r in many),
        )
        for name, many in results.items()
    }


def machine(device: str | None = None) -> str:
    """The machine and versions, to stand beside every number; ``device`` as :func:`skipdecode.load` takes it."""
    if torch.cuda.is_available() and (device is None or device.startswith("cuda")):
        device = torch.cuda.get_device_name(device)
    else:
        name = cpu_capabilities().get("cpu_name") or platform.machine()
        device = f"{name}, {torch.get_num_threads()} threads"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{device}; {versions}, Python {platform.python_version()}"
