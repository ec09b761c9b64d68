"""Bytes of keys and values: what is counted without a model is what the caches of tiny models report."""

from __future__ import annotations

import pytest
import torch

from helpers.families import LAYERS, WINDOW, build
from skipdecode import Schedule, SkipCache, attach
from skipdecode.core.growing import ROOM
from skipdecode.clock.layer_kv import measure_layer_kv
from skipdecode.planning.kv_bytes import LayerKV, peak_kv_bytes

SCHEDULES = {
    "full": Schedule.full(LAYERS),
    "top": Schedule(LAYERS, 6, 2, 9),
    "late": Schedule(LAYERS, 5, 4, ROOM + 4),
    "shallow prompt": Schedule(LAYERS, 7, 1, 40, order="even", prompt_layers="max"),
    "bottom": Schedule(LAYERS, 8, 3, 50, order="bottom"),
    "one step": Schedule(LAYERS, 8, 3, 1),
}


@pytest.mark.parametrize("name", ["opt", "llama", "gemma3", "mistral-sliding", "qwen3.5", "falcon-h1", "gemma4-shared"])
@pytest.mark.parametrize("key", SCHEDULES)
@torch.no_grad()
def test_bytes_are_foretold_step_by_step(name: str, key: str) -> None:
    """Windows, grouped heads, recurrences, room that is outgrown twice: after each step the most so far is known."""
    model, schedule, prompt, rows = attach(build(name)), SCHEDULES[key], WINDOW - 2, 3
    layers, cache = measure_layer_kv(model), SkipCache(model, schedule)
    ids, mask = torch.full((rows, prompt), 5), torch.ones(rows, prompt, dtype=torch.long)
    mask[0, :2] = 0
    for steps in range(64 - prompt):  # as far as positions go
        model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        assert cache.peak_kv_bytes == rows * peak_kv_bytes(layers, cache.schedule, prompt, steps), steps
        ids, mask = torch.full((rows, 1), 7), torch.nn.functional.pad(mask, (0, 1), value=1)


def test_what_bounds_a_layer() -> None:
    """Bytes grow with each position, up to a window, by whole rooms, or not at all."""
    assert LayerKV(per_position=10.0).at(8, 100) == 1000
    assert LayerKV(per_position=10.0, window=20).at(8, 100) == 190
    assert LayerKV(fixed=80.0).at(8, 100) == 80
    growing = LayerKV(per_position=1.0, room=32)
    assert [growing.at(8, n) for n in (8, 40, 41, 73, 74)] == [40, 40, 73, 73, 106]
