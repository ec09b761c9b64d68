"""Where a model runs, and in which type."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from skipdecode.loading import device
from skipdecode.loading.device import default_device, machine, placement

BFLOAT16 = SimpleNamespace(dtype=torch.bfloat16)
FLOAT16 = SimpleNamespace(dtype=torch.float16)


def test_bfloat16_stays_where_the_cpu_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere it would be slower than float32; float16 is on any CPU."""
    monkeypatch.setattr(device, "multiplies_bfloat16", lambda: True)
    assert placement(BFLOAT16, "auto", "cpu") == ("auto", "cpu")
    assert placement(FLOAT16, "auto", "cpu") == (torch.float32, "cpu")
    monkeypatch.setattr(device, "multiplies_bfloat16", lambda: False)
    assert placement(BFLOAT16, "auto", "cpu") == (torch.float32, "cpu")


def test_what_is_asked_for_stays() -> None:
    """And ``auto`` on an accelerator, where transformers takes the checkpoint's type."""
    assert placement(BFLOAT16, "float16", "cpu:0") == ("float16", "cpu")
    assert placement(FLOAT16, "auto", "cuda:1") == ("auto", "cuda:1")


def test_an_accelerator_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, expected in ((None, "cpu"), (torch.device("mps"), "mps")):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available, found=found: found)
        assert default_device() == expected
        assert placement(FLOAT16, "auto", None)[1] == expected


def test_features_of_the_cpu_are_read_where_torch_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True, "cpu_name": "x"}, raising=False)
    assert device.multiplies_bfloat16()
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not device.multiplies_bfloat16()


def test_a_cpu_has_no_peak_memory() -> None:
    assert device.watch_memory(torch.device("cpu"))() == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_peak_memory_is_that_of_a_gpu_since_the_call() -> None:
    torch.empty(10**8, device="cuda")
    peak = device.watch_memory(torch.device("cuda"))
    torch.empty(10**6, device="cuda")
    assert 10**6 <= peak() < 10**8


def test_a_machine_is_named_with_its_versions() -> None:
    assert f"torch {torch.__version__}" in machine("cpu")
    assert "threads" in machine("cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_that_torch_keeps_is_free() -> None:
    before = device.free_memory("cuda")
    kept = torch.empty(10**8, device="cuda")
    assert device.free_memory("cuda") < before
    del kept
    assert device.free_memory("cuda") == pytest.approx(before, rel=0.01)
