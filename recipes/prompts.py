"""Prompts that an adapter learns to answer: questions that a chat model makes up, and posts to be summarised.

    python recipes/prompts.py MODEL PROMPTS.jsonl [--questions 1700] [--posts train.jsonl] [--summaries 800]
        [--engine vllm]

POSTS: JSONL with `post`, as in Reddit TL;DR. The same command goes on after an interruption.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import typer

from skipdecode.data.tasks import get_task
from skipdecode.generation.engines import get_engine
from skipdecode.generation.job import GenerationJob
from skipdecode.training.self_prompts import prompts_for

#: Words of a post.
LONGEST = 90
ASK = "Summarize this post in one or two sentences.\n\n"
#: Questions of results/smollm2, which none may have learnt.
HELD_OUT = Path(__file__).resolve().parent.parent / "results" / "smollm2" / "prompts.jsonl"


def main(
    model: str,
    file: Path,
    questions: int = 1700,
    posts: Path | None = None,
    summaries: int = 800,
    seed: int = 7,
    engine: str = "transformers",
) -> None:
    """Write FILE, one conversation a line."""
    writer = get_engine(engine)
    job = GenerationJob(model, task=get_task("jsonl"), batch_size=128, seed=seed, dtype="bfloat16", engine=writer)
    asked = prompts_for(job, None, questions, file.with_name("own_prompts.jsonl"), say=typer.echo)
    held_out = {json.loads(line)["messages"][0]["content"] for line in HELD_OUT.read_text("utf-8").splitlines()}
    messages = [prompt[0].content for prompt in asked if not isinstance(prompt, str)]
    messages = [message for message in messages if message not in held_out]
    if posts is not None:
        lines = posts.read_text("utf-8").splitlines()
        random.Random(0).shuffle(lines)
        messages += [ASK + " ".join(json.loads(line)["post"].split()[:LONGEST]) for line in lines[:summaries]]
    random.Random(1).shuffle(messages)
    rows = ({"messages": [{"role": "user", "content": message}]} for message in messages)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
