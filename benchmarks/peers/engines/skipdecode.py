"""Ours: skipdecode.generate, at full depth and with the depths that the call gives."""

from __future__ import annotations

from typing import Any

import torch

import skipdecode
from peers.protocol import Generate, Job, serve
from skipdecode import Schedule
from skipdecode.generation.generate import generate_ids


class Ids:
    """Stands in for the tokenizer: the tokens themselves are compared, and no engine is timed writing text."""

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def decode(self, ids: list[int], **_: Any) -> str:
        """Return the numbers with spaces between them."""
        return " ".join(map(str, ids))


def load(job: Job) -> Generate:
    """Options: those of ``skipdecode.load``. Of a call: ``schedule``, a Schedule's JSON object; none for full depth."""
    torch.set_num_threads(job["threads"])
    options = {name: job["options"][name] for name in ("prepack", "quantization", "adapter") if name in job["options"]}
    model, tokenizer = skipdecode.load(job["checkpoint"], dtype=job["precision"], device="cpu", **options)
    ids: Any = Ids(tokenizer.pad_token_id)

    def generate(prompts: list[list[int]], new_tokens: int, schedule: dict[str, Any] | None = None) -> list[list[int]]:
        depths = Schedule.full(model.config.num_hidden_layers) if schedule is None else Schedule.from_dict(schedule)
        forced: Any = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
        result = generate_ids(model, ids, prompts, depths, len(prompts), **forced)
        return [[int(token) for token in row.text.split()] for row in result.completions]

    return generate


if __name__ == "__main__":
    serve(load, "torch", "transformers", "skipdecode")
