"""benchmarks/serving load: what ``vllm bench serve`` measures of a real server, and what that server says."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from helpers.server import Server
from serving import load
from serving.processes import Talking
from skipdecode.loading.load import DEMO

pytest_plugins = ["helpers.served"]


def test_a_load_run_measures_what_the_policy_did(server: Server, tmp_path: Path) -> None:
    """All requests at once, without a speed-up of their own: some wait, so later ones are moved to 5x; all are good."""
    given = argparse.Namespace(requests=24, prompt_tokens=24, new_tokens=8, slots=1)
    asked: Any = SimpleNamespace(running=server, model="demo", awake=nullcontext)
    program = [sys.executable, str(Path(load.__file__).with_name("client.py"))]
    with Talking(program, tmp_path / "client.log") as process:
        client = load.Client(process, given, DEMO)
        assert "vLLM 0." in client.versions
        found = client.ask(asked, None, "--goodput", "ttft:1e9", "tpot:1e9")
        assert found["completed"] == 24
        assert found["request_goodput"] == found["request_throughput"] > 0
        assert 0 < found["median_ttft_ms"] <= found["p99_ttft_ms"]
        assert 0 <= found["median_tpot_ms"] <= found["p99_tpot_ms"]
        assert 0 < found["moved"] < 24
        assert found["mean_speedup"] == pytest.approx(1 + 4 * found["moved"] / 24)
        assert 1 < found["decode_layer_ratio"] < 5
        slow = client.ask(asked, 100.0, "--goodput", "ttft:0")
        assert (slow["completed"], slow["request_goodput"]) == (24, 0)
