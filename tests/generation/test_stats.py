"""Stats of batches: they add up, and figures of nothing are those of the full model."""

from __future__ import annotations

from typing import Any

from skipdecode.generation.stats import GenerationStats


def test_stats_of_two_batches_add_up() -> None:
    """Memory does not: the larger peak counts."""
    step: dict[str, Any] = {"seconds": 2.0, "decode_seconds": 1.0, "steps": 10, "layer_steps": 40}
    rows: dict[str, Any] = {"row_layers": 90, "row_steps": 30, "prompt_positions": 30, "prompt_layer_positions": 180}
    stats = GenerationStats(8, rows=3, tokens=33, peak_kv_bytes=5, peak_memory_bytes=7, **step, **rows)
    assert (stats.average_depth, stats.layer_ratio, stats.row_depth, stats.prompt_depth) == (4, 2, 3, 6)
    assert (stats.job_depth, stats.tokens_per_second) == (220 / 40, 16.5)
    total = GenerationStats(8, peak_kv_bytes=4)
    total += stats
    assert total == stats
    total += GenerationStats(8, rows=1, tokens=3, seconds=1.0, peak_kv_bytes=3)
    assert (total.rows, total.tokens, total.seconds, total.steps) == (4, 36, 3.0, 10)
    assert (total.peak_kv_bytes, total.peak_memory_bytes) == (5, 7)


def test_stats_of_nothing_are_those_of_the_full_model() -> None:
    nothing = GenerationStats(8)
    assert {nothing.average_depth, nothing.prompt_depth, nothing.job_depth, nothing.row_depth} == {8.0}
    assert (nothing.layer_ratio, nothing.tokens_per_second) == (1, 0)


def test_a_summary_has_what_was_measured() -> None:
    """Rounded; an engine may not measure decoding and memory."""
    unmeasured = GenerationStats(8, rows=3, tokens=7, seconds=1.23456, steps=3, layer_steps=10).summary()
    figures = {"rows": 3, "tokens": 7, "seconds": 1.235, "tokens_per_second": 5.7, "average_depth": 3.33}
    assert unmeasured == figures | {"layer_ratio": 2.4}
    measured = GenerationStats(8, rows=1, decode_seconds=1.23456, steps=9, layer_steps=64)
    assert measured.summary()["decode_seconds"] == 1.235
