"""What batches cost for rows of very different lengths: ours, fixed ones of sorted rows, and rows in file order.

    python experiments/long_rows.py MODEL OUTPUT.json

200 prompts of 5 to 500 words and three of 3,000, in random order, at 2x. Beside the seconds of each way stands the sum
of what the rows take alone: per row in a batch of its own length, of the best of several sizes.
"""

from __future__ import annotations

import json
import random
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import typer

from skipdecode import load
from skipdecode.data.tokenize import encode_prompts
from skipdecode.generation import generate as generation
from skipdecode.generation.batches import split_batches
from skipdecode.loading.device import free_memory, machine
from skipdecode.schedule import Schedule

WORDS = "time person year way day thing man world life hand part child eye woman place work week case point".split()
GRID, SIZES = (5, 50, 125, 250, 500, 3000), (1, 4, 8, 16, 32)


def prompt(draw: random.Random, words: int) -> str:
    """Text of so many words."""
    return " ".join(draw.choices(WORDS, k=words))


def seconds(model: Any, tokenizer: Any, ids: Sequence[Any], batches: Sequence[Sequence[int]], new: int) -> float:
    """Seconds that given batches of prompts take."""
    schedule = Schedule.for_speedup(2, model.config.num_hidden_layers)
    with mock.patch.object(generation, "split_batches", return_value=[list(batch) for batch in batches]):
        start = time.perf_counter()
        generation.generate_ids(model, tokenizer, ids, schedule, 32, max_new_tokens=new, eos_token_id=-1)
    return time.perf_counter() - start


def main(name: str, output: Path, new_tokens: int = 32, rows: int = 200, long: int = 3) -> None:
    """Measure, and write the seconds of each way."""
    model, tokenizer = load(name, dtype="float32", device="cpu")
    draw = random.Random(0)
    lengths = [5 + 495 * i // (rows - 1) for i in range(rows)] + [3000] * long
    draw.shuffle(lengths)
    ids = encode_prompts(tokenizer, [prompt(draw, length) for length in lengths])
    free = free_memory("cpu")
    ours = split_batches(model.config, ids, 32, new_tokens, free / 4)
    in_order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
    chunks = [range(i, min(i + 32, len(ids))) for i in range(0, len(ids), 32)]
    ways: dict[str, Any] = {
        "ours": ours,
        "fixed, sorted": [[in_order[i] for i in chunk] for chunk in chunks],
        "file order": chunks,
        "ours again": ours,
    }
    found: dict[str, Any] = {"machine": machine(), "new tokens": new_tokens, "free GB": round(free / 1e9, 1)}
    alone = {}
    for words in GRID:
        same = encode_prompts(tokenizer, [prompt(draw, words) for _ in range(max(SIZES))])
        sizes = [size for size in SIZES if size * words <= 16000]
        alone[words] = min(seconds(model, tokenizer, same[:size], [range(size)], new_tokens) / size for size in sizes)
    found["rows alone"] = round(sum(between(alone, length) for length in lengths), 1)
    for way, batches in ways.items():
        found[way] = round(seconds(model, tokenizer, ids, batches, new_tokens), 1)
        found[f"{way}, peak GB so far"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 1)
        print(json.dumps(found), flush=True)
        output.write_text(json.dumps(found, indent=1) + "\n")


def between(alone: dict[int, float], words: int) -> float:
    """Seconds of a row of so many words, between those that were measured."""
    low = max(each for each in GRID if each <= words)
    high = min(each for each in GRID if each >= words)
    share = (words - low) / (high - low) if high > low else 0.0
    return alone[low] + share * (alone[high] - alone[low])


if __name__ == "__main__":
    typer.run(main)
