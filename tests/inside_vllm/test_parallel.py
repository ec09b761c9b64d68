"""Several processes: each makes its own plan of a step, and texts stay."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from helpers import server
from helpers.engine import SPEEDUPS, Reference, Request, demo_prompts, engine, serve
from helpers.server import ask, together


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def requests(reference: Reference) -> list[Request]:
    """Twelve prompts at each speed."""
    return [Request(prompt, speedup) for prompt in demo_prompts(reference)[:12] for speedup in SPEEDUPS]


def test_tensor_parallel_texts_are_those_of_generate(
    reference: Reference, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two share each layer, all speeds at once; both count the same layers."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with engine(tensor_parallel_size=2) as made:
        assert serve(made, requests).texts() == reference.texts(requests)
        one, other = made.collective_rpc("skipdecode_layers")
    assert one == other
    assert 0 < one["run"] < one["full"]


def test_data_parallel_texts_are_those_of_generate(
    reference: Reference, requests: list[Request], tmp_path: Path
) -> None:
    """Two engines behind one server, each with some of the requests; their counts add up."""
    from openai import AsyncOpenAI

    options = ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8", "--speedups", "1,2,3,5"]
    with server.serve(tmp_path, *options, "--data-parallel-size", "2") as running:
        client = AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=300)
        answers = together(*(ask(client, list(r.prompt), r.speedup, new=r.new) for r in requests))
        assert [tuple(answer.tokens) for answer in answers] == reference.texts(requests)
        assert all(running.total("vllm:request_success_total", engine=rank) > 0 for rank in ("0", "1"))
        for speedup in SPEEDUPS:
            assert running.total("skipdecode_requests_total", speedup=f"{speedup:g}") == len(requests) / len(SPEEDUPS)
