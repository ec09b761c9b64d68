"""transformers' own generate: its dynamic cache, a static one, and torch.compile with the static one."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, CompileConfig, StaticCache

from peers.protocol import Generate, Job, serve
from skipdecode.model.cache_name import CACHE


def load(job: Job) -> Generate:
    """Options: ``cache`` (dynamic, static), ``compile``, and ``prompt_lookup``, tokens guessed from the text so far."""
    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["checkpoint"], dtype=getattr(torch, job["precision"])).eval()
    positions = job["prompt_tokens"] + job["new_tokens"]
    static = job["options"].get("cache") == "static"
    compiled = job["options"].get("compile")
    config = CompileConfig(mode="default", dynamic=False)
    config._compile_all_devices = True  # transformers' own switch: without it, it compiles on GPUs only
    options = {"compile_config": config} if compiled else {"disable_compile": True}
    caches: dict[int, StaticCache] = {}

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        if static and len(prompts) not in caches:
            # One size for all calls, so that a shorter call is the same compiled step.
            torch.compiler.reset()  # another batch is another graph, not a dynamic one that is slower for all
            caches.clear()
            caches[len(prompts)] = StaticCache(config=model.config, max_cache_len=positions)
        for cache in caches.values():
            cache.reset()
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **{CACHE: caches.get(len(prompts))},
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            prompt_lookup_num_tokens=job["options"].get("prompt_lookup") if new_tokens > 1 else None,
            **options,
        )
        if compiled and new_tokens > 1 and not hasattr(model, "_compiled_call"):
            raise RuntimeError("transformers did not compile the model")
        return output[:, ids.shape[1] :].tolist()

    return generate


if __name__ == "__main__":
    serve(load, "torch", "transformers")
