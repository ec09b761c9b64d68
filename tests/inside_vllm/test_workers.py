"""What engines refuse that only vLLM's own objects can show, and the workers that ours stand before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm import SamplingParams
from vllm.config import CUDAGraphMode
from vllm.exceptions import VLLMValidationError
from vllm.utils.import_utils import resolve_obj_by_qualname

from helpers.engine import engine
from skipdecode.errors import UnsupportedModel
from skipdecode.serving import runner
from skipdecode.serving.configure import WORKERS, _without_graphs
from skipdecode.serving.plugin import _settled
from skipdecode.serving.settings import Serving
from skipdecode.weights.loading import DEMO, read_config


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
    _settled(lambda *_: SimpleNamespace(**fields))(processor)
    with pytest.raises(VLLMValidationError):
        _settled(lambda *_: SimpleNamespace(**fields | change))(processor)


@pytest.mark.parametrize("name", WORKERS)
def test_our_workers_stand_before_vllms(name: str) -> None:
    """Both can be imported where the other's device is not."""
    ours, theirs = resolve_obj_by_qualname(WORKERS[name]), resolve_obj_by_qualname(name)
    assert issubclass(ours, theirs)
    assert ours.init_device is not theirs.init_device


def test_gpus_run_without_graphs() -> None:
    """A graph holds the depth at which it was captured."""
    config = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL, max_cudagraph_capture_size=8)
    _without_graphs(config)
    assert (config.cudagraph_mode, config.cudagraph_capture_sizes) == (CUDAGraphMode.NONE, [])
