"""OpenVINO GenAI with paged attention (its continuous batching)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai

from peers.protocol import Generate, Job, serve


def load(job: Job) -> Generate:
    """Export the checkpoint once, and load it. Options: ``weights`` (fp16, int8, as optimum-cli names them)."""
    folder = Path(job["converted"])
    if not (folder / "openvino_model.xml").exists():
        export = ["export", "openvino", "--task", "text-generation-with-past", "--model", job["checkpoint"]]
        command = [str(Path(sys.executable).with_name("optimum-cli")), *export]
        subprocess.run([*command, "--weight-format", job["options"]["weights"], str(folder)], check=True)
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # the same prompts come in every round
    scheduler.max_num_seqs = job["rows"]
    scheduler.max_num_batched_tokens = max(job["rows"] * job["prompt_tokens"], 256)
    blocks = -(-(job["prompt_tokens"] + job["new_tokens"] + 1) // 32)  # of 32 tokens, on a CPU
    scheduler.num_kv_blocks = job["rows"] * (blocks + 1)
    hint = {"INFERENCE_PRECISION_HINT": job["precision"].replace("bfloat16", "bf16").replace("float32", "f32")}
    pipeline = genai.ContinuousBatchingPipeline(
        str(folder), scheduler, "CPU", {**hint, "INFERENCE_NUM_THREADS": job["threads"]}
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        config = genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        ids = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = pipeline.generate(ids, [config] * len(ids))
        return [list(result.m_generation_ids[0]) for result in results]

    return generate


if __name__ == "__main__":
    serve(load, "openvino", "openvino-genai", "optimum-intel", "transformers")
