"""Speed-ups of requests: what a client may ask for, and which KV-cache blocks two requests may share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import OPTConfig

from helpers.plans import LAYERS, SCHEDULES
from skipdecode.errors import ScheduleError
from skipdecode.model.config import speedup_key, to_config_entry
from skipdecode.serving.load_policy import Load
from skipdecode.serving.requests import (
    OWN,
    apply_model_name,
    assign_speedup,
    block_keys,
    bucket_ends,
    requested_speedup,
    speedup_of,
)
from skipdecode.serving.settings import Serving

SPEEDUPS = st.sampled_from(sorted(SCHEDULES))


def serving(**options: Any) -> Serving:
    config = OPTConfig(num_hidden_layers=LAYERS, skipdecode=to_config_entry(SCHEDULES))
    return Serving(config, {"speedups": [*SCHEDULES]} | options)


SERVING = serving()


def request(speedup: float | None, prompt: int = 5, its: Serving = SERVING) -> Any:
    """A request as the scheduler has it."""
    params = SimpleNamespace(extra_args=None if speedup is None else {"speedup": speedup, "other": 1})
    assign_speedup(params, its)
    return SimpleNamespace(sampling_params=params, num_prompt_tokens=prompt)


def test_a_request_without_a_speedup_gets_the_servers() -> None:
    """Other extra arguments stay; a client's own identity is replaced."""
    assert speedup_of(request(None).sampling_params) == 2
    assert request(3).sampling_params.extra_args["other"] == 1
    forged = SimpleNamespace(extra_args={OWN: {"speedup": 4.0}, "speedup": 3})
    assign_speedup(forged, SERVING)
    assert speedup_of(forged) == 3


@pytest.mark.parametrize("value", [0, 2.5, "fast", "2", True, [1, 2], float("nan"), 10**400], ids=str)
def test_a_speedup_that_is_not_offered_is_refused(value: Any) -> None:
    with pytest.raises(ScheduleError, match="speedup must be one of 1, 2, 3, 4, not"):
        requested_speedup(SimpleNamespace(extra_args={"speedup": value}), SERVING)


def test_a_models_name_is_a_speedup() -> None:
    """Other names say nothing; a name and an argument must agree."""
    for speedup in (1.0, 2.5, 4 / 3):
        params = SimpleNamespace(extra_args={"other": 1})
        apply_model_name(params, f"org/model-2x:{speedup_key(speedup)}x")
        assert params.extra_args == {"other": 1, "speedup": speedup}
    for name in (None, "", "demo", "demo:latest", "demo:x", "demo:3xl", "2x"):
        params = SimpleNamespace(extra_args=None)
        apply_model_name(params, name)
        assert params.extra_args is None
    params = SimpleNamespace(extra_args={"speedup": 3})
    apply_model_name(params, "demo:3x")
    with pytest.raises(ScheduleError, match="asks for 2x and vllm_xargs for 3"):
        apply_model_name(params, "demo:2x")


def test_under_load_requests_that_name_no_speedup_get_faster() -> None:
    its = serving(speedup=2, load_speedup=4, load_waiting=3)
    waiting = 0
    load = Load(lambda: (waiting, 0), **(its.load or {}))
    before, during, named = (SimpleNamespace(extra_args=extra) for extra in (None, {"other": 1}, {"speedup": 2}))
    assign_speedup(before, its, load)
    waiting = 4
    assign_speedup(during, its, load)
    assign_speedup(named, its, load)
    assert [params.extra_args["speedup"] for params in (before, during, named)] == [2, 4, 2]
    assert [params.extra_args[OWN]["moved"] for params in (before, during, named)] == [False, True, False]


@pytest.mark.parametrize("forged", [None, "x"])
def test_a_stock_servers_requests_are_left_alone(forged: Any) -> None:
    """There nobody assigns speed-ups, and the scheduler asks for every request's block keys."""
    stock = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={OWN: forged}), num_prompt_tokens=5)
    assert block_keys(stock, 0, 16) == []
    assert bucket_ends(stock) is None
    assert speedup_of(stock.sampling_params) is None


@given(SPEEDUPS, SPEEDUPS, st.integers(1, 20), st.integers(1, 20))
def test_blocks_are_shared_only_where_every_position_ran_the_same_layers(
    one: float, other: float, prompt: int, other_prompt: int
) -> None:
    """Of two requests with the same tokens: equal keys of all blocks so far mean equal layers at each position."""
    block = 4
    requests = [request(one, prompt), request(other, other_prompt)]
    for end in range(block, 28, block):
        keys = [[tuple(block_keys(r, start, start + block)) for start in range(0, end, block)] for r in requests]
        if keys[0] == keys[1]:
            counts = [SCHEDULES[s].positions_per_layer(p, end) for s, p in ((one, prompt), (other, other_prompt))]
            assert counts[0] == counts[1]


def test_prompts_at_full_depth_are_shared_by_all_speeds() -> None:
    """So are the texts of 1x, which are like prompts."""
    assert block_keys(request(1, 8), 0, 8) == block_keys(request(2, 8), 0, 8) == block_keys(request(1, 4), 0, 8)
    assert block_keys(request(2, 8), 8, 16) != block_keys(request(1, 8), 8, 16) == []
    assert block_keys(request(4, 8), 0, 8) != block_keys(request(2, 8), 0, 8)


def test_requests_say_where_their_buckets_end() -> None:
    """After the prompt at a constant depth; at once where prompts run no more themselves; never at 1x."""
    inf = float("inf")
    config = OPTConfig(num_hidden_layers=12)
    constant = Serving(config, {"speedups": [1, 3]})
    assert bucket_ends(request(3, 7, constant)) == [inf, 7, 7]
    assert bucket_ends(request(1, 7, constant)) == [inf, inf, inf]
    shallow = Serving(config, {"speedups": [1, 3], "prompt_layers": "max"})
    assert bucket_ends(request(3, 7, shallow)) == [inf, 0, 0]
