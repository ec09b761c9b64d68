"""Wall clock: equal numbers of decode steps for the same prompts, timed alternately.

Texts differ in length, and the longest text keeps its whole batch going, so the seconds of ordinary runs compare
lengths, not speeds. Therefore every timed run takes the same number of steps, and the runs alternate, so that whatever
else the machine does slows all of them alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..errors import ModelError
from ..generation.results import Cost, Generated

Name = TypeVar("Name", str, float)


@dataclass(frozen=True)
class Timing:
    """One run's texts and cost, and the medians over its repeats, in seconds."""

    result: Generated
    seconds: float
    decode_seconds: float

    @property
    def step_ms(self) -> float:
        """Milliseconds per decode step of a batch."""
        return 1e3 * self.decode_seconds / max(self.cost.steps, 1)

    @property
    def cost(self) -> Cost:
        """Layers, tokens and bytes: the same in every repeat."""
        return self.result.cost


@dataclass(frozen=True)
class Comparison:
    """A timed run beside the full model's of the same prompts and as many decode steps.

    Attributes:
        ratio: the full model's seconds over this run's, prompts included.
        decode_ratio: the same for one decode step.
        layer_ratio: the full model's layers over those that these very steps ran: the clock should not exceed it.
        seconds_per_1k, full_seconds_per_1k: seconds per 1,000 new tokens; ``ratio`` is theirs.
        step_ms, full_step_ms: milliseconds per decode step.
        batches: batches that were timed, all rounds together.
        rows: inputs.
    """

    ratio: float
    decode_ratio: float
    layer_ratio: float
    seconds_per_1k: float
    full_seconds_per_1k: float
    step_ms: float
    full_step_ms: float
    batches: int
    rows: int


#: Below these a clock figure is a rough one, and says so.
FEW_ROWS, FEW_BATCHES = 32, 5


def forced(steps: int) -> dict[str, int]:
    """Options of ``generate`` that make every batch take so many decode steps: end-of-sequence is held off."""
    return {"min_new_tokens": steps + 1, "max_new_tokens": steps + 1}


def typical_steps(lengths: Sequence[int]) -> int:
    """How many steps to time: the median of what batches of real texts take, at least one."""
    return max(statistics.median_low(lengths), 1)


def compare(full: Timing, own: Timing, repeats: int) -> Comparison:
    """``own`` beside ``full``. Raises ModelError if they did not take equal numbers of steps."""
    if full.result.lengths != own.result.lengths or full.cost.tokens != own.cost.tokens:
        raise ModelError(
            f"the timed texts came out at {full.cost.tokens} and {own.cost.tokens} tokens, where equal numbers were "
            "asked for: a model whose generation config stops texts early cannot be timed"
        )
    return Comparison(
        ratio=full.seconds / own.seconds,
        decode_ratio=full.step_ms / own.step_ms,
        layer_ratio=full.cost.num_layers / own.cost.average_depth,
        seconds_per_1k=1e3 * own.seconds / own.cost.tokens,
        full_seconds_per_1k=1e3 * full.seconds / full.cost.tokens,
        step_ms=own.step_ms,
        full_step_ms=full.step_ms,
        batches=len(own.result.lengths) * repeats,
        rows=own.cost.rows,
    )


def shown(ratio: float, layer_ratio: float) -> str:
    """A clock figure as it is printed: with an asterisk if it is more than the saved layers explain."""
    return f"{ratio:.2f}x" + ("*" if round(ratio, 2) > round(layer_ratio, 2) else "")


def remarks(figures: Sequence[str], rows: int, batches: int) -> dict[str, str]:
    """Notes below clock figures: what an asterisk means if there is one, and that few inputs make them rough."""
    notes = {}
    if any(figure.endswith("*") for figure in figures):
        notes["*"] = (
            "more than the saved layers explain: noise, few rows, or fewer layers' better fit into the machine's caches"
        )
    if rows < FEW_ROWS or batches < FEW_BATCHES:
        notes["rough"] = f"the clock is that of {rows} inputs and {batches} timed batches: give it more of them"
    return notes


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
