"""Time runs alternately, over the same prompts and equal numbers of decode steps.

Texts differ in length, and a batch decodes until its longest text ends, so ordinary runs would compare lengths, not
speeds. Therefore every timed run takes the same number of steps. The runs alternate so that other load on the machine
slows all of them alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..errors import ModelError
from ..generation.stats import GenerationOutput, GenerationStats

Name = TypeVar("Name", str, float)


@dataclass(frozen=True)
class Timing:
    """The result of a run's last repeat, and the median seconds over all repeats."""

    result: GenerationOutput
    seconds: float
    decode_seconds: float

    @property
    def step_ms(self) -> float:
        """Return the milliseconds per decode step of a batch."""
        return 1e3 * self.decode_seconds / max(self.stats.steps, 1)

    @property
    def seconds_per_1k(self) -> float:
        """Return the seconds per 1,000 new tokens."""
        return 1e3 * self.seconds / self.stats.tokens

    @property
    def stats(self) -> GenerationStats:
        """Return the last repeat's cost: its layers, tokens and bytes are equal in all repeats."""
        return self.result.stats


@dataclass(frozen=True)
class Comparison:
    """A timed run compared with the full model's run of the same prompts and decode steps.

    Attributes:
        ratio: the full model's seconds divided by this run's, prompts included.
        decode_ratio: the same for one decode step.
        layer_ratio: the full model's layers divided by the layers per timed step; no clock ratio should exceed it.
    """

    ratio: float
    decode_ratio: float
    layer_ratio: float


#: With fewer timed inputs or batches than this, :func:`remarks` calls the timings rough.
FEW_ROWS, FEW_BATCHES = 32, 5


def forced(steps: int) -> dict[str, int]:
    """Return options of ``generate`` that make every batch take exactly ``steps`` decode steps, whatever the texts."""
    return {"min_new_tokens": steps + 1, "max_new_tokens": steps + 1}


def typical_steps(lengths: Sequence[int]) -> int:
    """Return the number of steps to time: the median of ``lengths`` (decode steps of batches), at least 1."""
    return max(statistics.median_low(lengths), 1)


def compare(full: Timing, skipping: Timing) -> Comparison:
    """Return ``full``'s seconds and layers divided by ``skipping``'s. Raises ModelError if tokens or steps differ."""
    if full.result.lengths != skipping.result.lengths or full.stats.tokens != skipping.stats.tokens:
        raise ModelError(
            f"the timed texts came out at {full.stats.tokens} and {skipping.stats.tokens} tokens, where equal numbers "
            "were asked for: a model whose generation config stops texts early cannot be timed"
        )
    return Comparison(
        ratio=full.seconds / skipping.seconds,
        decode_ratio=full.step_ms / skipping.step_ms,
        layer_ratio=full.stats.num_layers / skipping.stats.average_depth,
    )


def shown(ratio: float, layer_ratio: float) -> str:
    """Format a ratio of seconds, with an asterisk if it exceeds ``layer_ratio``, the most that skipping explains."""
    return f"{ratio:.2f}x" + ("*" if round(ratio, 2) > round(layer_ratio, 2) else "")


def remarks(figures: Sequence[str], rows: int, batches: int) -> dict[str, str]:
    """Return notes on printed ratios: what an asterisk means, and that few inputs or batches make them rough."""
    notes = {}
    if any(figure.endswith("*") for figure in figures):
        notes["*"] = (
            "more than the saved layers explain: noise, few rows, or fewer layers' better fit into the machine's caches"
        )
    if rows < FEW_ROWS or batches < FEW_BATCHES:
        notes["rough"] = f"the clock is that of {rows} inputs and {batches} timed batches: give it more of them"
    return notes


def alternate(
    runs: Mapping[Name, Callable[[], GenerationOutput]], repeats: int, on_run: Callable[[], object] = lambda: None
) -> dict[Name, Timing]:
    """Make every run once per round: one round to warm up, then ``repeats`` timed rounds.

    Return by name the medians over the timed rounds; ``on_run`` is called after each run.
    """
    results: dict[Name, list[GenerationOutput]] = {name: [] for name in runs}
    for round_ in range(repeats + 1):
        for name, run in runs.items():
            result = run()
            if round_ > 0:
                results[name].append(result)
            on_run()
    return {
        name: Timing(
            many[-1],
            statistics.median(r.stats.seconds for r in many),
            statistics.median(r.stats.decode_seconds for r in many),
        )
        for name, many in results.items()
    }
