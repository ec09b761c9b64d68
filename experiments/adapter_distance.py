"""How far may a model's weights lie from those that its adapter was trained on? KL of each speed against the distance.

    python experiments/adapter_distance.py MODEL ADAPTER PROMPTS.jsonl OUTPUT.json

The texts are the model's own, greedy. Each change of the weights is made to all matrices of the layers, and KL compares
the changed model at each speed with the changed model at full depth.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
import typer
from torch import Tensor

from skipdecode import load
from skipdecode.data.examples import read_examples
from skipdecode.data.tasks import Example, get_task
from skipdecode.evaluation.divergence import divergence
from skipdecode.generation.generate import generate
from skipdecode.loading.device import machine
from skipdecode.model.config import trained_schedules
from skipdecode.model.inspect import decoder_layers
from skipdecode.training.distill import prefill


def rounded(weight: Tensor, bits: int, block: int | None = None) -> Tensor:
    """Weights rounded to integers of so many bits, with a scale for each block of a row, or for a row."""
    rows = weight.view(-1, block or weight.shape[1])
    scale = rows.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    return ((rows / scale).round() * scale).view_as(weight)


def noisy(weight: Tensor, share: float) -> Tensor:
    """Weights with normal noise of a share of their root mean square."""
    return weight + share * weight.square().mean().sqrt() * torch.randn_like(weight)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.clone,
    "bfloat16": lambda weight: weight.bfloat16().float(),
    "8 bits, a scale a row": partial(rounded, bits=8),
    "4 bits, a scale for 32 weights": partial(rounded, bits=4, block=32),
    **{f"noise of {share:.0%}": partial(noisy, share=share) for share in (0.01, 0.02, 0.05, 0.1, 0.2)},
}


def main(model: str, adapter: str, prompts: Path, output: Path, new_tokens: int = 96) -> None:
    """Measure each change, and write a row for each."""
    torch.manual_seed(0)
    network, tokenizer = load(model, adapter=adapter, dtype="float32", device="cpu")
    asked = [example.prompt for example in read_examples(prompts, get_task(), references=False)]
    written = generate(network, tokenizer, asked, speedup=1, batch_size=8, max_new_tokens=new_tokens).completions
    texts = [Example(p, (c.text,), c.finish_reason == "length") for p, c in zip(asked, written, strict=True)]
    schedules = trained_schedules(network)
    matrices = [weight for layer in decoder_layers(network) for weight in layer.parameters() if weight.ndim == 2]
    before = deepcopy([weight.data for weight in matrices])
    rows = []
    for name, change in CHANGES.items():
        for weight, old in zip(matrices, before, strict=True):
            weight.data = change(old)
        moved = sum(float((w.data - old).square().sum()) for w, old in zip(matrices, before, strict=True))
        distance = (moved / sum(float(old.square().sum()) for old in before)) ** 0.5
        found = divergence(prefill(network, tokenizer, texts), list(schedules.values()))
        kl = {f"{speedup:g}x": round(each.kl, 4) for speedup, each in zip(schedules, found, strict=True)}
        rows.append({"weights": name, "distance": round(distance, 5), "kl": kl})
        print(rows[-1], flush=True)
    about = {"model": model, "adapter": adapter, "prompts": len(asked), "tokens": new_tokens, "machine": machine()}
    output.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
