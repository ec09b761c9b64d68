"""Timing: equal steps, medians over rounds, and figures that cannot be trusted are marked."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import skipdecode
from helpers.tiny import TEXTS
from skipdecode import Schedule
from skipdecode.errors import ModelError
from skipdecode.generation.stats import GenerationOutput, GenerationStats
from skipdecode.latency.timing import Speedups, Timing, alternate, compare, forced


def output(lengths: list[int], tokens: int, seconds: float) -> GenerationOutput:
    """Output of batches that took so many steps."""
    steps = sum(lengths)
    stats = GenerationStats(8, tokens=tokens, seconds=seconds, decode_seconds=seconds / 2, steps=steps)
    stats.layer_steps = 8 * steps
    return GenerationOutput(stats, lengths=lengths)


def timing(lengths: list[int], tokens: int, seconds: float) -> Timing:
    return Timing(output(lengths, tokens, seconds), seconds, seconds / 2)


def test_every_run_takes_the_same_steps_whatever_ends_its_texts(checkpoint: Path) -> None:
    """Batches are left-padded, and the model would end each text at once."""
    model, tokenizer = skipdecode.load(str(checkpoint))
    first = model.generate(tokenizer("the", return_tensors="pt").input_ids, max_new_tokens=1, do_sample=False)[0, -1]
    model.generation_config.eos_token_id = [int(first), 1]
    prompts = [text[: 9 + i] for i, text in enumerate(TEXTS[:8])]
    schedules = {1.0: Schedule.full(8), 2.0: Schedule(8, 4, 4, 1), 4.0: Schedule(8, 3, 1, 6)}
    for steps in (1, 7):
        options: dict[str, Any] = {"batch_size": 3, "do_sample": False, **forced(steps)}
        runs = {
            speedup: partial(skipdecode.generate, model, tokenizer, prompts, schedule=schedule, **options)
            for speedup, schedule in schedules.items()
        }
        timings = alternate(runs, 1)
        for speedup, timed in timings.items():
            assert timed.output.lengths == [steps] * 3
            assert timed.stats.tokens == len(prompts) * (steps + 1)
            speedups = compare(timings[1.0], timed)
            assert speedups.layers == pytest.approx(schedules[speedup].layer_ratio(steps))
            assert speedups.end_to_end == pytest.approx(timings[1.0].seconds_per_1k / timed.seconds_per_1k)
            assert speedups.decoding == pytest.approx(timings[1.0].step_ms / timed.step_ms)


def test_runs_alternate_and_the_first_round_does_not_count() -> None:
    made: list[str] = []
    seconds = iter([9, 9, 1, 10, 2, 30, 6, 20])

    def run(name: str) -> GenerationOutput:
        made.append(name)
        return output([2], 4, next(seconds))

    done: list[int] = []
    timings = alternate({name: partial(run, name) for name in "ab"}, 3, on_run=lambda: done.append(1))
    assert made == [*"abababab"]
    assert len(done) == 8
    assert (timings["a"].seconds, timings["b"].seconds) == (2, 20)
    assert (timings["a"].decode_seconds, timings["b"].decode_seconds) == (1, 10)


def test_runs_of_unequal_tokens_or_steps_are_not_compared() -> None:
    with pytest.raises(ModelError, match="245 and 139 tokens"):
        compare(timing([100, 27], 245, 2.0), timing([17, 17], 139, 1.0))
    with pytest.raises(ModelError, match="stops texts early"):
        compare(timing([20, 20], 42, 2.0), timing([40], 42, 1.0))
    assert compare(timing([20, 20], 42, 2.0), timing([20, 20], 42, 1.0)) == Speedups(2, 2, 1)
