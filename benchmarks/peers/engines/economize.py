"""economize, which has SkipDecode too (training-free): its batched decoder, or its generate, at equal schedules."""

from __future__ import annotations

from typing import Any

import economize
import torch
from economize.techniques.dynamic_depth.skipdecode import SkipDecodeConfig
from transformers import AutoModelForCausalLM

from peers.protocol import Generate, Job, serve


def load(job: Job) -> Generate:
    """Options: ``api`` (decode_batch, generate). Of a call: ``schedule``, as ours takes it; none is no technique."""
    torch.set_num_threads(job["threads"])
    base = AutoModelForCausalLM.from_pretrained(job["checkpoint"], dtype=getattr(torch, job["precision"])).eval()
    whole = job["options"].get("api") == "generate"

    def generate(prompts: list[list[int]], new_tokens: int, schedule: dict[str, Any] | None = None) -> list[list[int]]:
        model = economize.apply(base, *([] if schedule is None else [config_of(schedule)]))
        ids = torch.tensor(prompts)
        if not whole:
            return [row.tokens.tolist() for row in model.decode_batch(ids, new_tokens)]
        forced = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **forced)
        return output[:, ids.shape[1] :].tolist()

    return generate


def config_of(schedule: dict[str, Any]) -> SkipDecodeConfig:
    """The same depths in economize's terms. Raises ValueError if they are not quite the same."""
    config = SkipDecodeConfig(
        max_layers=schedule["max_depth"], min_layers=schedule["min_depth"], decay=schedule["horizon"] - 1
    )
    own = config.active_layers(torch.arange(schedule["horizon"]), schedule["num_layers"]).tolist()
    if own != schedule["depths"] or schedule["order"] != "top" or schedule["warmup"]:
        raise ValueError(f"economize would run depths {own}, not those of {schedule}")
    return config


if __name__ == "__main__":
    serve(load, "torch", "transformers", "economize")
