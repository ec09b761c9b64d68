"""What engines refuse that only vLLM's own objects can show, and the workers that ours stand before."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm import SamplingParams
from vllm.config import CUDAGraphMode
from vllm.exceptions import VLLMValidationError
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.engine.async_llm import AsyncLLM

from helpers.engine import engine
from skipdecode.errors import UnsupportedModel
from skipdecode.loading.load import DEMO, read_config
from skipdecode.serving import frontend as frontend_module
from skipdecode.serving import plugin, runner
from skipdecode.serving.configure import WORKERS, _choose_graphs
from skipdecode.serving.cpu_worker import SkipCPUWorker
from skipdecode.serving.frontend import Frontend
from skipdecode.serving.plugin import _process_inputs
from skipdecode.serving.settings import Serving


def test_kinds_of_attention_that_keep_a_steps_metadata_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would read another part's, and write other texts."""
    monkeypatch.setattr(runner, "ATTENTION", ("FLASH_ATTN",))
    with pytest.raises(UnsupportedModel, match="CPU_ATTN keeps a step's metadata"), engine(DEMO):
        pass


@pytest.mark.parametrize("change", [{"mm_features": [object()]}, {"resumable": True}])
def test_requests_of_other_kinds_are_bad_requests(change: dict[str, Any]) -> None:
    """Pictures, and prompts that go on growing."""
    fields = {"sampling_params": SamplingParams(), "mm_features": None, "resumable": False}
    processor = SimpleNamespace(skipdecode=Serving(read_config(str(DEMO))))
    _process_inputs(lambda *_: SimpleNamespace(**fields), processor)
    with pytest.raises(VLLMValidationError):
        _process_inputs(lambda *_: SimpleNamespace(**fields | change), processor)


@pytest.mark.parametrize("name", WORKERS)
def test_our_workers_stand_before_vllms(name: str) -> None:
    """Both can be imported where the other's device is not."""
    ours, theirs = resolve_obj_by_qualname(WORKERS[name]), resolve_obj_by_qualname(name)
    assert issubclass(ours, theirs)
    assert ours.init_device is not theirs.init_device


def test_a_gpus_worker_leaves_its_events_and_streams() -> None:
    """vLLM's CPU runner puts placeholders in their place, for its whole process."""
    before = "import torch; before = torch.Event, torch.cuda.Event, torch.cuda.Stream; "
    after = "import skipdecode.serving.gpu_worker; assert before == (torch.Event, torch.cuda.Event, torch.cuda.Stream)"
    subprocess.run([sys.executable, "-c", before + after], check=True)


def test_a_release_without_our_places_leaves_stock_models_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line in the log; vLLM calls the plugin in each process, whatever is served."""
    from vllm import platforms

    said: list[str] = []
    monkeypatch.setattr(platforms, "current_platform", object())
    monkeypatch.setattr(plugin.logger, "error", lambda text, *args: said.append(text % args))
    plugin.register()
    assert len(said) == 1
    assert "no model skips layers" in said[0]


def test_a_release_with_some_of_our_places_refuses_models_with_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no others."""
    from vllm import platforms

    class Platform:
        @classmethod
        def check_and_update_config(cls, vllm_config: Any, more: int = 0) -> None:
            vllm_config.checked = True

    platform = Platform()
    monkeypatch.setattr(platforms, "current_platform", platform)
    monkeypatch.setattr(plugin, "_patch", lambda: AsyncLLM.no_such_place)
    plugin.register()
    model = SimpleNamespace(hf_config=SimpleNamespace())
    stock = SimpleNamespace(model_config=model, additional_config=None)
    platform.check_and_update_config(stock, more=1)
    assert stock.checked
    skipping = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=read_config(str(DEMO))), additional_config={"skipdecode": {}}
    )
    with pytest.raises(UnsupportedModel, match=r"does not fit this vLLM: .*no_such_place"):
        platform.check_and_update_config(skipping)


class Request:
    """A request as vLLM's output processor has it."""

    def __init__(self, name: str, new: int) -> None:
        self.request_id, self.prompt_len, self.num_cached_tokens, self.stats = name, 9, 0, SimpleNamespace()
        self.detokenizer, self.is_prefilling = SimpleNamespace(num_output_tokens=lambda: new), False


def test_figures_that_fail_end_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made in the loop that answers everybody: the first failure is logged, and requests end as ever."""
    frontend = Frontend(Serving(read_config(str(DEMO))), "demo")
    said: list[str] = []
    monkeypatch.setattr(frontend_module.logger, "exception", said.append)
    monkeypatch.setattr(frontend_module, "count_finished", lambda *_: 1 / 0)
    for name in ("a", "b"):
        frontend._followed[name] = Request(name, 3), 2.0, False
        frontend._end(name, "stop")
    assert not frontend._followed
    assert len(said) == 1


def test_a_request_that_fails_before_its_first_token_is_no_work() -> None:
    """vLLM says then that its prompt is read; nobody knows how much of it was."""
    frontend = Frontend(Serving(read_config(str(DEMO))), "demo")
    for new, tokens in ((0, 0), (1, 9)):
        state = Request(f"failed{new}", new)
        frontend._followed[state.request_id] = state, 2.0, False
        frontend._end(state.request_id, "error")
        assert state.stats.skipdecode["prompt_tokens"] == tokens


def test_connectors_are_refused_where_vllm_adds_them_late() -> None:
    """--kv-offloading-size makes one once the config was checked: at the start, and again in the worker."""
    from vllm.engine.arg_utils import EngineArgs

    with pytest.raises((UnsupportedModel, ValueError), match="--kv-offloading-size"):
        EngineArgs(model=str(DEMO), kv_offloading_size=1).create_engine_config()
    late = EngineArgs(model=str(DEMO)).create_engine_config()
    late.kv_transfer_config = object()
    worker: Any = SkipCPUWorker.__new__(SkipCPUWorker)
    worker.vllm_config = late
    with pytest.raises(UnsupportedModel, match="KV connectors"):
        worker.init_device()


def test_gpus_keep_graphs_of_whole_decode_steps_alone() -> None:
    """A graph holds the layers at which it was captured: runner V2 is told of which kind a step is."""
    config = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, cudagraph_capture_sizes=[8])
    _choose_graphs(config, is_v2=True)
    assert (config.cudagraph_mode, config.cudagraph_capture_sizes) == (CUDAGraphMode.FULL_DECODE_ONLY, [8])
    _choose_graphs(config, is_v2=False)
    assert (config.cudagraph_mode, config.cudagraph_capture_sizes) == (CUDAGraphMode.NONE, [])
