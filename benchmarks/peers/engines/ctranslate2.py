"""CTranslate2. It refuses bfloat16 on CPUs: int8 and float32."""

from __future__ import annotations

import json
from pathlib import Path

import ctranslate2
from ctranslate2.converters import TransformersConverter

from peers.protocol import Generate, Job, serve


def load(job: Job) -> Generate:
    """Convert the checkpoint once, and load it."""
    folder = Path(job["converted"])
    if not (folder / "model.bin").exists():
        converter = TransformersConverter(job["checkpoint"], low_cpu_mem_usage=True)
        converter.convert(str(folder), quantization=job["precision"], force=True)
    generator = ctranslate2.Generator(
        str(folder), device="cpu", compute_type=job["precision"], inter_threads=1, intra_threads=job["threads"]
    )
    vocabulary = json.loads((Path(job["checkpoint"]) / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    names = {token: name for name, token in vocabulary.items()}

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        results = generator.generate_batch(
            [[names[token] for token in prompt] for prompt in prompts],
            max_length=new_tokens,
            min_length=new_tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return [result.sequences_ids[0] for result in results]

    return generate


if __name__ == "__main__":
    serve(load, "ctranslate2", "transformers")
