"""The sizing table of docs/scaling.md: bytes of weights, and of the keys and values of one row, from configs alone.

    python tools/sizing.py
    python tools/sizing.py --prompt 2048 --new 512 llama-3.1-8b

One pass of each model runs on torch's meta device, which computes and allocates nothing; the bytes are those that the
package counts of its own caches.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from model_shapes import SHAPES, shape_config
from skipdecode import Schedule
from skipdecode.model.cache import layer_kv_bytes
from skipdecode.model.cache_name import CACHE

MODELS = ("opt-1.3b", "llama-3.2-1b", "llama-3.1-8b", "opt-6.7b")
SPEEDUPS = (3, 5)


def row(name: str, prompt: int, new: int) -> list[str]:
    """The table's row of one model, in bfloat16."""
    with torch.device("meta"), torch.no_grad():
        model = AutoModelForCausalLM.from_config(shape_config(name), dtype=torch.bfloat16)
        cache = DynamicCache(config=model.config)
        model(torch.zeros(1, prompt, dtype=torch.long), **{CACHE: cache})
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    layers = [layer_kv_bytes(layer) / prompt for layer in cache.layers]
    position, held = sum(layers), prompt + new - 1  # the last token of a text is written and never read
    kept = [
        held * sum(layers[layer] for layer in schedule.layers(schedule.max_depth))
        for speedup in SPEEDUPS
        for schedule in [Schedule.for_speedup(speedup, len(layers), 64, decay="constant")]
    ]
    full = position * held
    return [
        name,
        str(len(layers)),
        f"{weights / 1e9:.2f}",
        f"{position / 1e3:.1f}",
        *(f"{value / 1e6:.1f}" for value in (full, position * prompt, *kept)),
    ]


def table(names: Sequence[str], prompt: int, new: int) -> str:
    """Markdown."""
    heads = ["shape", "layers", "weights, GB", "KV of a token, kB", "KV of a row, MB", "at the end of its prompt"]
    heads += [f"while it decodes at {speedup}x" for speedup in SPEEDUPS]
    rows = [heads, ["---"] * len(heads), *(row(name, prompt, new) for name in names)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="shape", help=", ".join(SHAPES))
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="new tokens of a text")
    given = parser.parse_args()
    print(table(given.names or MODELS, given.prompt, given.new))
