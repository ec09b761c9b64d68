"""deploy/ray_serve.py: two replicas write what ``generate`` writes; one that is killed loses no other's requests."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
pytest.importorskip("ray.serve", reason="needs Ray Serve: pip install 'ray[serve]'")

from openai import APIError, AsyncOpenAI

from helpers.engine import Reference, Request
from helpers.server import ENVIRONMENT, Answer, ask, together

pytest_plugins = ["helpers.served"]
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
URL = "http://127.0.0.1:8000"  # Ray Serve's own
OPTIONS = "--dtype float32 --enforce-eager --kv-cache-memory-bytes 41943040 --max-num-seqs 16 --speedups 1,3,5"
NEW, PATIENCE = 32, 300
pytestmark = pytest.mark.timeout(1200)


def replicas() -> dict[psutil.Process, list[psutil.Process]]:
    """Each replica, and the engines below it: other servers may run beside."""
    found = {}
    for each in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            if "ServeReplica" in " ".join(each.cmdline()):
                found[each] = [
                    below for below in each.children(recursive=True) if "EngineCore" in "".join(below.cmdline())
                ]
    return found


def two() -> bool:
    """Whether two replicas have an engine each."""
    return sorted(map(len, replicas().values())) == [1, 1]


def until(holds: Callable[[], bool]) -> None:
    """Wait for it."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.5)


def healthy() -> bool:
    """Whether a replica answers."""
    with suppress(OSError), urllib.request.urlopen(f"{URL}/health", timeout=10) as answer:
        return bool(answer.status == 200)
    return False


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[None]:
    """The command at the file's head, with two replicas of the embedded checkpoint."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ray = {"PATH": path, "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120", "RAY_USAGE_STATS_ENABLED": "0"}
    arguments = ["model=demo", f"options={OPTIONS}", "replicas=2", "cpus=0.5"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            ["serve", "run", "--working-dir", ".", "ray_serve:app", *arguments],
            cwd=DEPLOY,
            stdout=log,
            stderr=log,
            env=os.environ | ENVIRONMENT | ray,
        )
    try:
        until(lambda: process.poll() is not None or healthy())
        assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
        yield
    finally:
        below = psutil.Process(process.pid).children(recursive=True)  # its Ray, and no other
        process.terminate()
        psutil.wait_procs([*below, process], timeout=60)
        for each in (process, *below):
            with suppress(psutil.NoSuchProcess):
                each.kill()


def test_two_replicas(deployed: None, solo: Reference, inputs: list[str]) -> None:
    """At all speeds, streamed and not; with one replica killed, texts that come are right and the rest are errors."""
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=300)
    prompts = [tuple(solo.tokenizer(text)["input_ids"]) for text in inputs[:8]]
    requests = [Request(prompt, speedup, NEW) for prompt in prompts for speedup in (1.0, 3.0, 5.0)]
    texts = solo.texts(requests)

    def asked() -> list[Any]:
        return [
            ask(client, list(each.prompt), new=NEW, model=f"demo:{each.speedup:g}x", stream=number % 2 == 0)
            for number, each in enumerate(requests)
        ]

    until(two)
    assert [tuple(answer.tokens) for answer in together(*asked())] == texts

    replica, *_ = replicas()
    (server,) = replica.children()

    async def killed() -> list[Any]:
        waiting = [asyncio.ensure_future(each) for each in asked()]
        await asyncio.sleep(0.3)
        replica.kill()
        return await asyncio.gather(*waiting, return_exceptions=True)

    (answers,) = together(killed())
    for answer, text in zip(answers, texts, strict=True):
        assert isinstance(answer, APIError) or (isinstance(answer, Answer) and tuple(answer.tokens) == text)
    assert sum(isinstance(answer, Answer) for answer in answers) > 0
    until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)  # it ends with its replica
    until(two)
    until(healthy)
    assert [tuple(answer.tokens) for answer in together(*asked())] == texts
