"""The same prompts at several speeds: the texts that each writes, and equal numbers of steps timed alternately."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..clock.timing import Comparison, Timing, alternate, compare, forced, typical_steps
from ..core.schedule import Schedule
from ..data.chat import Prompt
from ..generation.generate import generate
from ..generation.results import Generated


@dataclass(frozen=True)
class Speeds:
    """What :func:`compare_speeds` found, by target speed-up.

    Attributes:
        written: texts as the model ends them, with their cost.
        timings: the timed runs: ``steps`` decode steps for every batch at every speed.
        clocks: each timed run beside that of 1x.
    """

    schedules: Mapping[float, Schedule]
    written: Mapping[float, Generated]
    timings: Mapping[float, Timing]
    clocks: Mapping[float, Comparison]
    steps: int

    def rows(self) -> list[dict[str, Any]]:
        """One row of plain numbers per speed. Ratios are against 1x: of layers, of a decode step, of the whole run."""
        return [
            {
                "target": speedup,
                "average_depth": round(timing.cost.average_depth, 3),
                "layer_ratio": round(timing.cost.layer_ratio, 3),
                "tokens": timing.cost.tokens,
                "steps": timing.cost.steps,
                "seconds": round(timing.seconds, 4),
                "wall_clock_ratio": round(self.clocks[speedup].ratio, 3),
                "step_ms": round(timing.step_ms, 3),
                "decoding_ratio": round(self.clocks[speedup].decode_ratio, 3),
                "texts_layer_ratio": round(self.written[speedup].cost.layer_ratio, 3),
                "texts_tokens": self.written[speedup].cost.tokens,
                "peak_kv_bytes": timing.cost.peak_kv_bytes,
            }
            for speedup, timing in self.timings.items()
        ]


def compare_speeds(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    schedules: Mapping[float, Schedule],
    *,
    repeats: int = 5,
    on_run: Callable[[], object] = lambda: None,
    **options: Any,
) -> Speeds:
    """Write texts at every speed, then time as many decode steps as the median batch takes at 1x.

    Args:
        schedules: by target speed-up; 1 must be among them.
        repeats: rounds timed, all speeds in turn; medians count.
        on_run: called after each of ``(repeats + 2) * len(schedules)`` runs.
        options: of :func:`skipdecode.generate`.
    """
    written = {}
    for speedup, schedule in schedules.items():
        written[speedup] = generate(model, tokenizer, prompts, schedule=schedule, **options)
        on_run()
    steps = typical_steps(written[1].lengths)
    options |= forced(steps)
    runs = {k: partial(generate, model, tokenizer, prompts, schedule=s, **options) for k, s in schedules.items()}
    timings = alternate(runs, repeats, on_run=on_run)
    clocks = {speedup: compare(timings[1], timing, repeats) for speedup, timing in timings.items()}
    return Speeds(schedules, written, timings, clocks, steps)
