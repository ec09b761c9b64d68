"""Several processes: each makes its own plan of a step, and texts stay."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from helpers.engine import KV_BYTES, SPEEDUPS, Reference, Request, demo_prompts
from helpers.server import ask, serve, together
from skipdecode.loading.load import DEMO


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
    from vllm import LLM, SamplingParams

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    engine = LLM(
        str(DEMO),
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_num_seqs=16,
        kv_cache_memory_bytes=KV_BYTES,
        tensor_parallel_size=2,
        additional_config={"skipdecode": {"speedups": [*SPEEDUPS]}},
    )
    try:
        asked = [SamplingParams(temperature=0, max_tokens=r.new, extra_args={"speedup": r.speedup}) for r in requests]
        prompts = [{"prompt_token_ids": list(r.prompt)} for r in requests]
        outputs = engine.generate(prompts, asked, use_tqdm=False)
        assert [tuple(output.outputs[0].token_ids) for output in outputs] == reference.texts(requests)
        one, other = engine.collective_rpc("skipdecode_layers")
        assert one == other
        assert one["run"] == one["needed"] < one["full"]
    finally:
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()


def test_data_parallel_texts_are_those_of_generate(
    reference: Reference, requests: list[Request], tmp_path: Path
) -> None:
    """Two engines behind one server, each with some of the requests; their counts add up."""
    from openai import AsyncOpenAI

    options = ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8", "--speedups", "1,2,3,5"]
    with serve(tmp_path, *options, "--data-parallel-size", "2") as server:
        client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)
        answers = together(*(ask(client, list(r.prompt), r.speedup, new=r.new) for r in requests))
        assert [tuple(answer.tokens) for answer in answers] == reference.texts(requests)
        assert all(server.total("vllm:request_success_total", engine=rank) > 0 for rank in ("0", "1"))
        for speedup in SPEEDUPS:
            assert server.total("skipdecode_requests_total", speedup=f"{speedup:g}") == len(requests) / len(SPEEDUPS)
