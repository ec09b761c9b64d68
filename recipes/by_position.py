"""Where in a text a speed parts from full depth: by position, of texts that full depth wrote and of its own.

    python recipes/by_position.py ADAPTER RESULTS [--data FILE] [--task NAME] [--dtype bfloat16]

RESULTS is what `skipdecode evaluate` wrote for the adapter's model, with the same data: its rows/ hold greedy texts.
Writes RESULTS/by_position.json: the tables of docs/adapter_results.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from torch.nn.functional import log_softmax

from skipdecode import attach
from skipdecode.data.collator import batches_of
from skipdecode.data.inputs import read_examples
from skipdecode.data.tasks import Example, get_task
from skipdecode.data.tokenize import encode_response
from skipdecode.generation.generate import max_positions
from skipdecode.loading.load import load
from skipdecode.model.adapter import read_schedules
from skipdecode.model.config import num_layers
from skipdecode.model.teacher_forcing import PrefilledBatch
from skipdecode.schedule import Schedule

#: Positions of generated tokens, from the second on: the first follows the prompt, which runs all layers.
PARTS = ((2, 8), (9, 16), (17, 32), (33, 64), (65, 128))


#: Of each part: tokens, their KL divergence, how many have the same likeliest one; ends of texts, and what probability
#: full depth and the speed give to an end there, and elsewhere.
SUMS = ("tokens", "kl", "same", "ends", "end_full", "end_here", "no_end_full", "no_end_here")


def main(
    adapter: Path,
    results: Path,
    data: Path = Path("results/smollm2/prompts.jsonl"),
    task: str = "jsonl",
    dtype: str = "float32",
    batch_size: int = 8,
) -> None:
    """Measure each speed of RESULTS."""
    rows = [json.loads(path.read_text("utf-8")) for path in sorted((results / "rows").glob("*.json"))]
    ours = (str(adapter), str(adapter.resolve()))
    texts = {row["target"]: row["texts"] for row in rows if row["method"] == "full" or row["model"] in ours}
    prompts = [each.prompt for each in read_examples(get_task(task), data, "test", print)[: len(texts[1])]]
    model, tokenizer = load(str(adapter), dtype=dtype)
    schedules = {target: each for target, each in read_schedules(adapter).items() if target in texts}
    written = [Example(prompt, (text,)) for prompt, text in zip(prompts, texts[1], strict=True)]
    batches = batches_of(written, tokenizer, batch_size, max_positions(model.config), model.device, as_written=True)
    tokens = {
        target: encode_response(tokenizer, [*zip(prompts, each, strict=True)], as_written=True)
        for target, each in texts.items()
    }
    longest = max(map(len, tokens[1]))
    found = along(batches, attach(model), schedules, tokenizer.eos_token_id, longest - 1)
    for target, parts in found.items():
        same = [shared(*pair) for pair in zip(tokens[1], tokens[target], strict=True)]
        for part in parts:
            reach = [n for n, full in zip(same, tokens[1], strict=True) if len(full) >= part["last"]]
            part |= {"texts": len(reach), "still_same": sum(n >= part["last"] for n in reach)}
    about = {"texts": len(prompts), "dtype": dtype, "tokens": {t: sum(map(len, tokens[t])) for t in sorted(tokens)}}
    (results / "by_position.json").write_text(json.dumps(about | {"speeds": found}, indent=1) + "\n", "utf-8")


@torch.no_grad()
def along(
    batches: Sequence[dict[str, Any]], model: Any, schedules: dict[float, Schedule], end: int, most: int
) -> dict[float, list[dict[str, Any]]]:
    """Return, by speed and part, sums over the positions of full depth's texts, and over their ends.

    Args:
        end: the end-of-text token.
        most: texts of so many tokens were cut off: their end was not written.
    """
    sums = {target: [dict.fromkeys(SUMS, 0.0) | {"first": a, "last": b} for a, b in PARTS] for target in schedules}
    for batch in batches:
        passes = PrefilledBatch(model, batch)
        labels = batch["labels"][:, 2:]
        position = torch.arange(2, 2 + labels.shape[1], device=labels.device).expand_as(labels)
        wanted = labels != -100
        at, is_end = position[wanted], labels[wanted] == end
        kept = ~(is_end & (at > most))
        full = log_softmax(passes.logits(Schedule.full(num_layers(model.config)))[wanted].float(), -1)
        for target, schedule in schedules.items():
            here = log_softmax(passes.logits(schedule)[wanted].float(), -1)
            kl = (full.exp() * (full - here)).sum(-1)
            same = full.argmax(-1) == here.argmax(-1)
            for part in sums[target]:
                inside = kept & (part["first"] <= at) & (at <= part["last"])
                ends = inside & is_end
                part["tokens"] += int(inside.sum())
                part["kl"] += float(kl[inside].sum())
                part["same"] += int(same[inside].sum())
                part["ends"] += int(ends.sum())
                part["end_full"] += float(full[ends, end].exp().sum())
                part["end_here"] += float(here[ends, end].exp().sum())
                part["no_end_full"] += float(full[inside & ~is_end, end].exp().sum())
                part["no_end_here"] += float(here[inside & ~is_end, end].exp().sum())
    return sums


def shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two texts begin with in common."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


if __name__ == "__main__":
    typer.run(main)
