"""Whether rows that have ended should leave a batch, and when: the same batches with and without, timed in turn.

    python benchmarks/rows.py opt-1.3b --batch 8,32 --speedups 1,3

Run it alone on the machine. The weights are random: rows end where the lengths of E2E's texts say.
``rows`` is the share of row-steps that were computed. Ratios are the seconds of the batch whose rows stay over these:
of the whole job, and of its decode steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from model_shapes import random_model
from skipdecode import Schedule, attach
from skipdecode.generation import batch
from skipdecode.generation import finished_rows as leaving
from skipdecode.generation.stats import GenerationOutput
from skipdecode.latency.resolve import new_schedule
from skipdecode.latency.timing import alternate
from skipdecode.loading.device import machine

#: Deciles of response lengths in tokens: E2E NLG's dev set.
DECILES = (7, 16, 19, 21, 24, 26, 28, 30, 33, 37, 94)
#: The share of the rows in the cache at which those that have ended leave it.
WAYS = {"stay": 0.0, "half": 0.5, "any": 0.999}


class Ends(LogitsProcessor):
    """Ends each row after so many tokens, and not before."""

    def __init__(self, lengths: Sequence[int], width: int, eos: int) -> None:
        self.lengths, self.width, self.eos = torch.tensor(lengths), width, eos

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (rows, vocabulary)."""
        ends = self.lengths.to(scores.device) == input_ids.shape[1] - self.width + 1
        scores[:, self.eos] = torch.where(ends, torch.inf, -torch.inf)
        return scores


def spread(rows: int) -> list[int]:
    """Lengths of ``rows`` texts, evenly over the quantiles: straight lines between deciles."""
    places = [(row + 0.5) / rows * (len(DECILES) - 1) for row in range(rows)]
    return [round(DECILES[int(p)] + p % 1 * (DECILES[int(p) + 1] - DECILES[int(p)])) for p in places]


def main() -> None:
    """Print one JSON line per cell and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", help="of `skipdecode bench`")
    parser.add_argument("--batch", default="8,32")
    parser.add_argument("--speedups", default="1,3")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--ways", default="stay,half,any")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    model, tokenizer = random_model(given.shape, dtype=given.dtype, device=given.device)
    attach(model)
    print(json.dumps({"shape": given.shape, "machine": machine(given.device)}), flush=True)
    for size in map(int, given.batch.split(",")):
        for speedup in map(float, given.speedups.split(",")):
            cell(given, model, tokenizer, size, speedup)


def cell(given: argparse.Namespace, model: Any, tokenizer: Any, size: int, speedup: float) -> None:
    """Time one batch in all ways."""
    eos, ends = 2, spread(size)
    vocabulary = model.config.vocab_size
    prompts = torch.randint(vocabulary // 8, vocabulary, (size, given.prompt_tokens)).tolist()
    forced = LogitsProcessorList([Ends(ends, given.prompt_tokens, eos)])
    options: dict[str, Any] = {"max_new_tokens": max(ends), "eos_token_id": eos, "logits_processor": forced}
    full = Schedule.full(model.config.num_hidden_layers)
    schedule = full if speedup == 1 else new_schedule(model.config, speedup, [sum(ends) // size])
    passes: list[int] = []  # rows of each pass

    def run(way: str) -> GenerationOutput:
        leaving.SHARE = WAYS[way]
        passes.clear()
        rows, cost = batch.generate_batch(model, tokenizer, prompts, schedule, **options)
        computed[way] = sum(passes[1:]) / (size * cost.steps)
        return GenerationOutput(cost, rows, [cost.steps])

    computed: dict[str, float] = {}
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda module, ids: passes.append(len(ids[0])))
    timings = alternate({way: partial(run, way) for way in given.ways.split(",")}, given.rounds)
    hook.remove()
    stay = timings["stay"]
    for way, timing in timings.items():
        row = {"batch": size, "speedup": speedup, "way": way, "steps": timing.stats.steps}
        row |= {"tokens": timing.stats.tokens, "rows": round(computed[way], 3)}
        row |= {"seconds": round(timing.seconds, 3), "job_ratio": round(stay.seconds / timing.seconds, 3)}
        row |= {"step_ratio": round(stay.decode_seconds / timing.decode_seconds, 3)}
        row |= {
            "kv_bytes": timing.stats.peak_kv_bytes,
            "same_texts": timing.result.completions == stay.result.completions,
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
