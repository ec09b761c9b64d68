"""Layer-tokens of a request: what steps ran for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import OPTConfig

from helpers.plans import LAYERS, SCHEDULES, plan
from skipdecode.model.config import to_config_entry
from skipdecode.serving.metrics import RequestMetrics, layer_tokens
from skipdecode.serving.settings import Serving
from skipdecode.serving.steps import DepthTables


@pytest.mark.parametrize("speedup", sorted(SCHEDULES))
@pytest.mark.parametrize("cached", [0, 5, 12])
@pytest.mark.parametrize("new", [0, 1, 2, 60])
def test_layer_tokens_are_those_of_the_steps_plan(speedup: float, cached: int, new: int) -> None:
    prompt, steps = 12, max(new - 1, 0)
    counts = layer_tokens(DepthTables(SCHEDULES).of(speedup), prompt, cached, new)
    count = prompt + steps - cached
    planned = sum(plan([(speedup, prompt, cached, count)]).counts) if count else 0
    assert counts["prompt_layer_tokens"]["run"] + counts["decode_layer_tokens"]["run"] == planned
    assert (counts["prompt_tokens"], counts["decode_steps"]) == (prompt - cached, steps)
    assert counts["prompt_layer_tokens"]["of"] == LAYERS * (prompt - cached)
    assert counts["decode_layer_tokens"]["of"] == LAYERS * steps


def test_requests_wait_until_their_first_token() -> None:
    config = OPTConfig(num_hidden_layers=8, skipdecode=to_config_entry(SCHEDULES))
    metrics = RequestMetrics(Serving(config, {"load_speedup": 4, "load_waiting": 1}), "demo")
    states: Any = {name: SimpleNamespace(is_prefilling=name != "b") for name in "abc"}
    metrics._states = states
    assert metrics.requests() == (2, 1)
    assert metrics.load is not None
    assert metrics.load.refresh()
