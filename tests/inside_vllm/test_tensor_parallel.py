"""Two processes share each layer: both make the same plan of a step, and texts stay."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from helpers.engine import KV_BYTES, Reference, Request
from skipdecode.weights.loading import DEMO


def test_tensor_parallel_texts_are_those_of_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """All speeds at once; both ranks count the same layers."""
    from vllm import LLM, SamplingParams

    reference = Reference("demo")
    lines = (DEMO / "inputs.csv").read_text(encoding="utf-8").splitlines()[1:13]
    prompts = [tuple(reference.tokenizer(f"{line.strip(chr(34))} ->")["input_ids"]) for line in lines]
    requests = [Request(prompt, speedup) for prompt in prompts for speedup in (1.0, 2.0, 3.0, 5.0)]
    expected = reference.texts(requests)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    engine = LLM(
        str(DEMO),
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_num_seqs=16,
        kv_cache_memory_bytes=KV_BYTES,
        tensor_parallel_size=2,
        additional_config={"skipdecode": {"speedups": [1, 2, 3, 5]}},
    )
    try:
        asked = [SamplingParams(temperature=0, max_tokens=r.new, extra_args={"speedup": r.speedup}) for r in requests]
        given = [{"prompt_token_ids": list(r.prompt)} for r in requests]
        outputs = engine.generate(given, asked, use_tqdm=False)
        assert [tuple(output.outputs[0].token_ids) for output in outputs] == expected
        one, other = engine.collective_rpc("skipdecode_layers")
        assert one == other
        assert one["run"] == one["needed"] < one["full"]
    finally:
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
