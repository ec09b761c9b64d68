"""``skipdecode probe``: what skipping layers does to a model before any training."""

import json
from dataclasses import asdict
from typing import Annotated, Any

from typer import Option

from . import options as o
from .console import print_table, say


def probe(
    model: o.Model,
    speedups: o.Speedups = None,
    prompts: o.Prompts = None,
    num_texts: Annotated[int, Option(min=8, help="Self-generated texts; half of them fit the bypasses.")] = 64,
    max_new_tokens: o.MaxNewTokens = None,
    rank: o.Rank = 256,
    dtype: o.Dtype = "auto",
    as_json: o.Json = False,
) -> None:
    """Measure the KL divergence from the full model for speeds and choices of layers, without training.

    skipdecode probe HuggingFaceTB/SmolLM2-135M-Instruct --speedups 1.5,2
    """
    from ..training.probe import probe as run

    speeds = o.parse_speedups(speedups) or (1.25, 1.5, 2.0)
    options: dict[str, Any] = {"prompts": prompts, "num_texts": num_texts, "rank": rank, "dtype": dtype}
    tried = run(model, speeds, max_new_tokens=max_new_tokens or 96, **options, say=say)
    rows = []
    for each in tried:
        schedule = each.schedule
        kept = f"top, {schedule.warmup} at the bottom" if schedule.order == "top" else str(schedule.order)
        cells = [f"{each.speedup:g}x", kept, str(schedule.max_depth)]
        for found in (each.skipped, each.bypassed):
            cells += [f"{found.kl:.2f}", f"{found.top1:.0%}"]
        rows.append(cells)
    header = ["speed", "layers kept", "depth", "KL", "same token", "KL, bypassed", "same token, bypassed"]
    best = {min((t.bypassed.kl, i) for i, t in enumerate(tried) if t.speedup == speed)[1] for speed in set(speeds)}
    print_table(header, rows, bold=best)
    if as_json:
        print(json.dumps([asdict(each) for each in tried]))
