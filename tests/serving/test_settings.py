"""Which speed-ups a server offers, the schedule of each, and which configs of vLLM are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import OPTConfig

from skipdecode import Schedule
from skipdecode.errors import ScheduleError, UnsupportedModel
from skipdecode.model.adapter import Adapter, save_adapter
from skipdecode.model.config import to_config_entry
from skipdecode.serving.settings import Buckets, Serving, choose_buckets, prepare_config, serving_of
from skipdecode.serving.steps import DepthTable

LAYERS, RELEASE = 12, "0.32.0+cpu"
FALLING = {speedup: Schedule.for_speedup(speedup, LAYERS, 20, decay="linear") for speedup in (2.0, 3.0, 5.0)}
CONSTANT = {speedup: Schedule.for_speedup(speedup, LAYERS) for speedup in (2.0, 3.0, 5.0)}


def config(schedules: dict[float, Schedule] | None = None) -> OPTConfig:
    return OPTConfig(num_hidden_layers=LAYERS, skipdecode=schedules and to_config_entry(schedules))


def test_a_stock_model_has_constant_schedules_and_runs_at_1x() -> None:
    serving = Serving(config())
    assert list(serving.schedules) == [1, 2, 3, 5]
    assert serving.default == 1
    assert all(schedule.max_depth == schedule.min_depth for schedule in serving.schedules.values())
    assert Serving(config(), {"speedups": [4, 2]}).default == 2


@pytest.mark.parametrize(
    ("options", "offered", "default"),
    [
        ({}, [2, 3, 5], 2),
        ({"speedup": 1}, [1, 2, 3, 5], 1),
        ({"speedups": [1, 5, 3]}, [1, 3, 5], 3),
        ({"speedups": [1, 2.5]}, [1, 2.5], 1),
        ({"speedup": 2, "load_speedup": 4, "load_waiting": 1}, [2, 3, 4, 5], 2),
    ],
    ids=str,
)
def test_a_trained_model_offers_what_it_was_trained_for(options: Any, offered: list[float], default: float) -> None:
    """1x only where it is asked for; the slowest trained speed above 1 is the default."""
    serving = Serving(config(FALLING), options)
    assert list(serving.schedules) == offered
    assert serving.default == default
    assert all(serving.schedules[speedup] == FALLING[speedup] for speedup in offered if speedup in FALLING)


def test_prompts_run_as_many_layers_as_the_operator_says() -> None:
    """A schedule whose first step runs more uses that depth."""
    assert [s.deepest for s in Serving(config(CONSTANT), {"prompt_layers": "max"}).schedules.values()] == [6, 4, 2]
    assert [s.deepest for s in Serving(config(CONSTANT), {"prompt_layers": "5"}).schedules.values()] == [6, 5, 5]


def test_an_adapter_offers_the_speeds_that_it_was_trained_for(tmp_path: Path) -> None:
    """And 1x where it is asked for; no other, which would run layers that it does not know."""
    save_adapter(tmp_path, Adapter(16, 2, CONSTANT), nn.Linear(2, 2), "base")
    options = {"adapter": str(tmp_path)}
    serving = Serving(config(FALLING), options)
    assert serving.schedules == CONSTANT
    assert serving.untrained is None
    assert Serving(config(), options | {"speedups": [1, 2]}).schedules[1.0] == Schedule.full(LAYERS)
    with pytest.raises(ScheduleError, match="trained for 2x and 3x and 5x"):
        Serving(config(), options | {"speedups": [1.2]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_speedup": 2}, "no options of skipdecode: max_speedup; it has"),
        ({"speedup": 2, "speedups": [1, 3]}, "speedup must be one of 1, 3, not 2"),
        ({"speedups": [1, 99]}, "99"),
        ({"speedup": 2, "prompt_layers": 99}, "99"),
        ({"schedule": Schedule.full(5).to_dict()}, "5 layers"),
        ({"load_speedup": 5}, "a load policy needs"),
        ({"load_waiting": 3}, "a load policy needs"),
        ({"load_speedup": 99, "load_waiting": 1, "speedups": [1, 2]}, "load_speedup must be one of"),
        ({"load_speedup": 2, "load_waiting": 1, "speedups": [2, 3]}, "is not above the default"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Serving(config(), options)


# --- buckets


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any depths, orders, and prompts of their own depth."""
    least, most = sorted((draw(st.integers(1, LAYERS)), draw(st.integers(1, LAYERS))))
    return Schedule(
        LAYERS,
        most,
        least,
        horizon=draw(st.integers(2, 9)),
        order=draw(st.one_of(st.sampled_from(["top", "bottom", "even"]), st.permutations(range(LAYERS)).map(tuple))),
        prompt_decay=draw(st.integers(0, 4)),
        prompt_layers=draw(st.sampled_from([None, "max", most])),
    )


@given(schedules(), st.sampled_from([2, 3, 4, 6]), st.permutations(range(LAYERS)), st.integers(1, 9))
def test_a_bucket_ends_where_the_last_position_runs_one_of_its_layers(
    schedule: Schedule, count: int, order: list[int], prompt: int
) -> None:
    """Also in buckets that follow another ranking."""
    buckets: Buckets = tuple(tuple(order[place::count]) for place in range(count))
    length = prompt + schedule.horizon + 5
    counts = np.array(schedule.positions_per_layer(prompt, length))
    for bucket in buckets:
        assert min(max(prompt + DepthTable(schedule).end(bucket), 0), length) == counts[list(bucket)].max()


@pytest.mark.parametrize("served", [CONSTANT, FALLING])
def test_buckets_are_equal_parts_of_all_layers(served: dict[float, Schedule]) -> None:
    buckets = choose_buckets([Schedule.full(LAYERS), *served.values()])
    assert sorted(layer for bucket in buckets for layer in bucket) == list(range(LAYERS))
    assert len(buckets) > 1
    assert len({len(bucket) for bucket in buckets}) == 1


def test_there_are_no_more_buckets_than_free_something() -> None:
    """Thirds where all requests run a third; none where nothing retires, or layers have no equal parts."""
    assert choose_buckets([CONSTANT[3.0]]) == ((0, 9, 10, 11), (5, 6, 7, 8), (1, 2, 3, 4))
    assert choose_buckets([Schedule.full(LAYERS)]) == ()
    assert choose_buckets([Schedule(LAYERS, 11, 11, horizon=1, decay="constant")]) == ()
    assert choose_buckets([Schedule.for_speedup(3, 31)]) == ()


# --- configs of vLLM


def vllm_config(**changes: Any) -> Any:
    """A config as vLLM's, as far as the plugin asks; changes by ``part__field``."""
    parallel = ("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size")
    made = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config(), is_moe=False, dtype=torch.float32, uses_mrope=False),
        parallel_config=SimpleNamespace(
            worker_cls="vllm.v1.worker.cpu_worker.CPUWorker",
            prefill_context_parallel_size=1,
            **dict.fromkeys(parallel, 1),
        ),
        cache_config=SimpleNamespace(kv_offloading_size=None),
        compilation_config=SimpleNamespace(mode=None),
        additional_config={"skipdecode": {}},
        speculative_config=None,
        kv_transfer_config=None,
        lora_config=None,
    )
    for name, value in changes.items():
        *parts, field = name.split("__")
        setattr(getattr(made, parts[0]) if parts else made, field, value)
    return made


def test_a_stock_model_without_options_is_left_alone() -> None:
    assert serving_of(vllm_config(additional_config={})) is None
    assert serving_of(vllm_config(additional_config=object())) is None
    assert serving_of(vllm_config()) is not None
    assert serving_of(vllm_config(additional_config={}, model_config__hf_config=config(CONSTANT))) is not None


def test_an_untrained_model_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    made = vllm_config()
    prepare_config(made, Serving(config(CONSTANT)))
    assert not caplog.messages
    prepare_config(made, Serving(config()))
    assert "not trained to skip layers" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"environment": "VLLM_USE_RUST_FRONTEND"}, "unset VLLM_USE_RUST_FRONTEND"),
        ({"parallel_config__worker_cls": "another.Worker"}, "worker another.Worker is unknown"),
        ({"compilation_config__mode": SimpleNamespace(name="STOCK_TORCH_COMPILE")}, "stock torch.compile"),
        ({"speculative_config": object()}, "speculative"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline"),
        ({"parallel_config__data_parallel_size": 2, "model_config__is_moe": True}, "data parallel"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "context parallelism"),
        ({"kv_transfer_config": object()}, "KV connectors"),
        ({"cache_config__kv_offloading_size": 1.0}, "--kv-offloading-size"),
        ({"lora_config": object()}, "LoRA"),
        ({"model_config__uses_mrope": True}, "multimodal"),
    ],
)
def test_what_would_give_other_texts_is_refused(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable := change.pop("environment", None):
        monkeypatch.setenv(variable, "1")
    with pytest.raises(UnsupportedModel, match=message):
        prepare_config(vllm_config(**change), Serving(config()))
