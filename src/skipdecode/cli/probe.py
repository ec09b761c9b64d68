"""``skipdecode probe``: what skipping layers does to a model before any training."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

from typer import Option

from . import options as o
from .console import Bar, print_table, say


def probe(
    model: o.Model,
    speedups: Annotated[str, Option(help="Speeds with commas between.")] = "1.1,1.25,1.5,2,3",
    prompts: Annotated[str | None, Option(help="File of prompts; default: the model's own.")] = None,
    num_texts: Annotated[int, Option(min=8, help="Texts to write; half of them fit the bypasses.")] = 64,
    max_new_tokens: Annotated[int, Option(min=2, help="Longest text, in tokens.")] = 96,
    adapter_rank: Annotated[int, Option(min=1, help="Rank of the low-rank bypasses.")] = 256,
    batch_size: Annotated[int, Option(min=1, help="Texts measured together.")] = 8,
    seed: Annotated[int, Option(help="Random seed.")] = 0,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    as_json: o.Json = False,
) -> None:
    """Measure the KL divergence from the full model for speeds and choices of layers, without training.

    skipdecode probe HuggingFaceTB/SmolLM2-135M-Instruct --speedups 1.5,2
    """
    from ..training.probe import probe as run

    options = {"prompts": prompts, "num_texts": num_texts, "max_new_tokens": max_new_tokens, "seed": seed}
    options |= {"adapter_rank": adapter_rank, "batch_size": batch_size, "dtype": dtype, "device": device}
    with Bar() as bar:
        tried = run(model, o.parse_numbers(speedups), **options, on_progress=bar.show, say=say)
    rows = []
    for each in tried:
        schedule = each.schedule
        kept = f"top, {schedule.warmup} at the bottom" if schedule.order == "top" else str(schedule.order)
        cells = [f"{each.speedup:g}x", kept, str(schedule.max_depth)]
        for found in (each.skipped, each.bypassed):
            cells += [f"{found.kl:.2f}", f"{found.top1:.0%}"]
        rows.append(cells)
    heads = ["speed", "layers kept", "depth", "KL skipped", "top-1 skipped", "KL bypassed", "top-1 bypassed"]
    least = {
        min((each.bypassed.kl, number) for number, each in enumerate(tried) if each.speedup == k)[1]
        for k in {each.speedup for each in tried}
    }
    print_table(heads, rows, bold=least)
    if as_json:
        print(json.dumps([asdict(each) for each in tried]))
