"""Timing of runs in alternation, over the same prompts and equal numbers of decode steps.

Texts differ in length, and a batch decodes until its longest text ends: else lengths would be compared, not speeds.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import ModelError
from ..generation.stats import GenerationOutput, GenerationStats

Name = TypeVar("Name", str, float)


@dataclass(frozen=True)
class Timing:
    """Output of a run's last round, and the medians of its seconds over all rounds."""

    output: GenerationOutput
    seconds: float
    decode_seconds: float

    @property
    def stats(self) -> GenerationStats:
        """Stats of the last round: layers, tokens and bytes are equal in all rounds."""
        return self.output.stats

    @property
    def step_ms(self) -> float:
        """Milliseconds of a batch's decode step."""
        return 1e3 * self.decode_seconds / max(self.stats.steps, 1)

    @property
    def seconds_per_1k(self) -> float:
        """Seconds per 1,000 new tokens, prompts included."""
        return 1e3 * self.seconds / self.stats.tokens


@dataclass(frozen=True)
class Speedups:
    """The full model's figures divided by another run's: seconds end to end, seconds of a step, layers of a step."""

    end_to_end: float
    decoding: float
    layers: float


def forced(steps: int) -> dict[str, Any]:
    """Options of ``generate`` that make every batch take exactly ``steps`` decode steps."""
    return {"min_new_tokens": steps + 1, "max_new_tokens": steps + 1}


def typical_steps(lengths: Sequence[int]) -> int:
    """Number of decode steps to time: the median of the batches' ``lengths``, at least 1."""
    return max(statistics.median_low(lengths), 1)


def alternate(
    runs: Mapping[Name, Callable[[], GenerationOutput]], rounds: int, on_run: Callable[[], object] = lambda: None
) -> dict[Name, Timing]:
    """Timing of each run, by name, from ``rounds`` rounds in which every run is made once.

    A round before them warms up. Runs alternate so that other load on the machine slows all of them alike.
    """
    outputs: dict[Name, list[GenerationOutput]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            outputs[name].append(run())
            on_run()
    timings = {}
    for name, (_, *timed) in outputs.items():
        seconds = statistics.median(output.stats.seconds for output in timed)
        decode_seconds = statistics.median(output.stats.decode_seconds for output in timed)
        timings[name] = Timing(timed[-1], seconds, decode_seconds)
    return timings


def compare(full: Timing, other: Timing) -> Speedups:
    """How many times faster ``other`` is than ``full``. Raises ModelError if their tokens or steps differ."""
    if full.output.lengths != other.output.lengths or full.stats.tokens != other.stats.tokens:
        tokens = f"{full.stats.tokens} and {other.stats.tokens} tokens"
        raise ModelError(f"timed texts have {tokens}: the model's generation_config stops texts early")
    return Speedups(
        end_to_end=full.seconds / other.seconds,
        decoding=full.step_ms / other.step_ms,
        layers=full.stats.num_layers / other.stats.average_depth,
    )
