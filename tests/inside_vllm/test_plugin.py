"""What the plugin refuses that only vLLM's own objects can show, and what it leaves alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import vllm
from transformers import OPTConfig
from vllm import SamplingParams, platforms
from vllm.config import CUDAGraphMode
from vllm.exceptions import VLLMValidationError

from helpers.engine import engine
from skipdecode.errors import UnsupportedModel
from skipdecode.serving import plugin
from skipdecode.serving import runner as runner_module
from skipdecode.serving.metrics import RequestMetrics, _prometheus
from skipdecode.serving.settings import Serving, _choose_graphs

CONFIG = OPTConfig(num_hidden_layers=8)


def test_attention_that_keeps_a_steps_metadata_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would read another subset's, and write other texts."""
    monkeypatch.setattr(runner_module, "ATTENTION", ("FLASH_ATTN",))
    with pytest.raises(UnsupportedModel, match="CPU_ATTN keeps a step's metadata"), engine():
        pass


@pytest.mark.parametrize("change", [{"mm_features": [object()]}, {"resumable": True}])
def test_requests_of_other_kinds_are_bad_requests(change: dict[str, Any]) -> None:
    """Pictures, and prompts that go on growing."""
    fields = {"sampling_params": SamplingParams(), "mm_features": None, "resumable": False}
    processor = SimpleNamespace(skipdecode=Serving(CONFIG))
    plugin._process_inputs(lambda *_: SimpleNamespace(**fields), processor)
    with pytest.raises(VLLMValidationError):
        plugin._process_inputs(lambda *_: SimpleNamespace(**fields | change), processor)


def test_a_release_that_cannot_be_patched_refuses_models_with_schedules_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Platform:
        @classmethod
        def check_and_update_config(cls, vllm_config: Any, more: int = 0) -> None:
            vllm_config.checked = True

    def lacking() -> None:
        raise ImportError("no module vllm.v1")

    platform: Any = Platform()
    monkeypatch.setattr(platforms, "current_platform", platform)
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    monkeypatch.setattr(plugin, "_patch_engine", lacking)
    plugin.register()
    stock = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace()), additional_config=None)
    platform.check_and_update_config(stock, more=1)
    assert stock.checked
    skipping = SimpleNamespace(model_config=SimpleNamespace(hf_config=CONFIG), additional_config={"skipdecode": {}})
    with pytest.raises(UnsupportedModel, match=r"vLLM 0\.99\.1 .* lacks a part: no module vllm\.v1"):
        platform.check_and_update_config(skipping)


def test_gpus_keep_graphs_of_whole_decode_steps_alone() -> None:
    """A graph holds the layers at which it was captured: runner V2 is told of which layer set a step is."""
    config = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, cudagraph_capture_sizes=[8])
    _choose_graphs(config, is_v2=True)
    assert (config.cudagraph_mode, config.cudagraph_capture_sizes) == (CUDAGraphMode.FULL_DECODE_ONLY, [8])
    _choose_graphs(config, is_v2=False)
    assert (config.cudagraph_mode, config.cudagraph_capture_sizes) == (CUDAGraphMode.NONE, [])


@pytest.mark.parametrize(("new", "tokens"), [(0, 0), (1, 9), (3, 9)])
def test_a_request_that_fails_before_its_first_token_is_no_work(new: int, tokens: int) -> None:
    """vLLM says then that its prompt is read; nobody knows how much of it was."""
    metrics = RequestMetrics(Serving(CONFIG), "demo")
    stats = SimpleNamespace(first_token_latency=1.0, first_token_ts=1.0, last_token_ts=2.0)
    state = SimpleNamespace(
        prompt_len=9,
        num_cached_tokens=0,
        stats=stats,
        skipdecode={"speedup": 2.0, "moved": True},
        detokenizer=SimpleNamespace(num_output_tokens=lambda: new),
    )
    before = _prometheus()["moved"].labels("demo", "2")._value.get()
    metrics._finish(lambda *_: None, state, "stop", None)
    assert state.stats.skipdecode["prompt_tokens"] == tokens
    assert state.stats.skipdecode["moved"]
    assert _prometheus()["moved"].labels("demo", "2")._value.get() == before + 1
