"""The check of an engine before it serves: it holds for the engine as it is, and fails for each planted fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
import vllm
from vllm.v1.core import kv_cache_utils

from helpers.engine import engine, runner
from helpers.interpreted import V2
from helpers.server import serve
from skipdecode.errors import UnsupportedModel
from skipdecode.serving import self_check, steps
from skipdecode.serving.attention import SubsetMetadata
from skipdecode.serving.gate import Gate
from skipdecode.serving.kv_blocks import BucketKVCacheManager
from skipdecode.serving.self_check import check_engine, is_needed
from skipdecode.serving.settings import GPU_WORKER, TESTED, serving_of

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def made(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An engine with prefix caching and chunked prompts."""
    with engine(dtype=request.param, enable_prefix_caching=True, max_num_batched_tokens=96) as made:
        yield made


def check(made: Any) -> None:
    serving: Any = serving_of(made.vllm_config)
    made.reset_prefix_cache()
    check_engine(made, serving)


def test_an_engine_as_it_is_passes(monkeypatch: Patch) -> None:
    """With ``check`` before it serves, and it tells what was compared."""
    told: list[str] = []
    monkeypatch.setattr(self_check.logger, "warning", told.append)
    with engine(skipdecode={"check": True}):
        pass
    (said,) = told
    assert "1x, 2x, 3x, 5x" in said
    speeds, rounds = 4, 3
    assert f"{speeds * rounds * len(self_check.LENGTHS) * self_check.NEW} tokens" in said


def test_a_server_is_checked_before_it_listens(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    options = ["--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(40 << 20)]
    with serve(tmp_path, "--check", "--speedups", "2,5", *options) as server:
        log = (tmp_path / "server.log").read_text(encoding="utf-8")
        assert "self-check of 288 tokens at 2x, 5x" in log
        assert log.index("self-check of") < log.index("Starting vLLM server")
        assert server.post("/v1/completions", {"model": "demo:5x", "prompt": "name", "max_tokens": 4})[0] == 200


@pytest.mark.parametrize(
    ("change", "needed"),
    [
        ({}, False),
        ({"check": True}, True),
        ({"worker": GPU_WORKER}, True),
        ({"release": "0.33.1"}, True),
        ({"release": f"{TESTED}+cpu"}, False),
    ],
)
def test_what_was_not_tested_is_checked(change: dict[str, Any], needed: bool, monkeypatch: Patch) -> None:
    monkeypatch.setattr(vllm, "__version__", change.get("release", TESTED))
    config = SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=change.get("worker", "")))
    serving: Any = SimpleNamespace(check=change.get("check", False))
    assert is_needed(config, serving) is needed


def test_quantized_weights_are_not_checked_and_that_is_told() -> None:
    said: list[str] = []
    config = SimpleNamespace(model_config=SimpleNamespace(quantization="fp8"))
    never: Any = lambda *_: pytest.fail("the engine was asked")  # noqa: E731
    self_check.self_check(config, serving_of(SimpleNamespace(model_config=None)), never, never, said.append)  # type: ignore[arg-type]
    assert "not checked" in said[0]


@pytest.mark.parametrize("options", [{"max_logprobs": 2}, {"logprobs_mode": "raw_logits"}], ids=str)
def test_options_that_hide_what_is_compared_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="needs --max-logprobs"), engine(skipdecode={"check": True}, **options):
        pass


def other_layer(made: Any, patch: Patch) -> None:
    """Fast steps run another layer than the schedule's."""
    tables = runner(made).skip_tables
    fast = tables._runs.sum(axis=1) < tables._runs.shape[1]
    runs = tables._runs.copy()
    runs[fast] = np.roll(runs[fast], 1, axis=1)
    patch.setattr(tables, "_runs", runs)


def layer_too_few(made: Any, patch: Patch) -> None:
    """A layer that runs at each speed does not, in fast steps."""
    tables = runner(made).skip_tables
    runs = tables._runs.copy()
    runs[runs.sum(axis=1) < runs.shape[1], -1] = False
    patch.setattr(tables, "_runs", runs)


def other_speed(made: Any, patch: Patch) -> None:
    """All requests run at 2x."""
    tables = runner(made).skip_tables
    patch.setattr(type(tables), "of", lambda self, speedup: self._tables[2.0])


def later_by_one(made: Any, patch: Patch) -> None:
    """A schedule begins one token late."""
    original = steps.DepthTables.step
    late: Any = lambda self, tables, counts, computed, prompts: original(self, tables, counts, computed, prompts + 1)  # noqa: E731
    patch.setattr(steps.DepthTables, "step", late)


def prompts_too_shallow(made: Any, patch: Patch) -> None:
    """A prompt's last token runs the first step's layers."""
    original = steps.DepthTables.step
    early: Any = lambda self, tables, counts, computed, prompts: original(self, tables, counts, computed, prompts - 1)  # noqa: E731
    patch.setattr(steps.DepthTables, "step", early)


def shorter_attention(made: Any, patch: Patch) -> None:
    """Attention of a subset leaves out the newest key."""
    original = SubsetMetadata.__init__

    def init(self: Any, *args: Any) -> None:
        original(self, *args)
        self.common["seq_lens"] = (self.common["seq_lens"] - 1).clamp(min=1)

    patch.setattr(SubsetMetadata, "__init__", init)


def other_slots(made: Any, patch: Patch) -> None:
    """Keys of a subset are written where its neighbours' belong."""
    original = SubsetMetadata.__init__

    def init(self: Any, *args: Any) -> None:
        original(self, *args)
        self.slots = {name: slots.roll(1) for name, slots in self.slots.items()}

    patch.setattr(SubsetMetadata, "__init__", init)


def lost_output(made: Any, patch: Patch) -> None:
    """A layer's output is dropped where it ran for some tokens."""
    original = Gate._run

    def run(self: Any, forward: Any, subset: Any, plan: Any, kwargs: Any) -> None:
        before = dict(kwargs)
        original(self, forward, subset, plan, kwargs)
        if subset is not None and self.index == 3:
            kwargs |= before

    patch.setattr(Gate, "_run", run)


def wrong_weights(made: Any, patch: Patch) -> None:
    """A layer's output is a tenth larger, at every speed."""
    (layer,) = [module for name, module in runner(made).model.named_modules() if name.endswith("layers.2")]
    gate: Any = layer.forward
    original = gate.original

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        return output * 1.1 if isinstance(output, torch.Tensor) else (output[0] * 1.1, *output[1:])

    patch.setattr(gate, "original", forward)


def shared_blocks(made: Any, patch: Patch) -> None:
    """Blocks of all speeds are one in the prefix cache; keys and values of a fast text's positions are reused."""
    plain: Any = lambda request, start, end, start_mm: (None, start_mm)  # noqa: E731
    patch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", plain)


def freed_early(made: Any, patch: Patch) -> None:
    """Blocks of layers that still run are given to others."""

    def ends(self: Any, request: Any) -> None:
        for manager in self.coordinator.single_type_managers[1:]:
            manager.end = 8

    patch.setattr(BucketKVCacheManager, "_set_ends", ends)


FAULTS: list[Callable[[Any, Patch], None]] = [
    other_layer,
    layer_too_few,
    other_speed,
    later_by_one,
    prompts_too_shallow,
    shorter_attention,
    other_slots,
    lost_output,
    wrong_weights,
    shared_blocks,
    freed_early,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(made: Any, fault: Callable[[Any, Patch], None], monkeypatch: Patch) -> None:
    """With the speed, and the first layer that differs; without the fault, the same engine passes again."""
    with monkeypatch.context() as patch:
        fault(made, patch)
        with pytest.raises(UnsupportedModel, match=r"self-check failed at [\d.]+x, .* layer") as failed:
            check(made)
    if fault is wrong_weights:
        assert "at 1x, alone, first in layer 2" in str(failed.value)
    if not V2:  # whose kernels are interpreted
        check(made)
