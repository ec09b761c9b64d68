"""Prompts for an adapter: conversations that a chat model generates, and posts to be summarised.

    python recipes/prompts.py MODEL PROMPTS.jsonl [--questions 1700] [--posts train.jsonl] [--summaries 800]
        [--engine vllm]

POSTS: JSONL with `post`, as in Reddit TL;DR. The same command resumes after an interruption.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import typer
from tqdm import tqdm

from skipdecode.data.chat import Message, as_json
from skipdecode.generation.job import GenerationJob
from skipdecode.loading.load import Checkpoint
from skipdecode.training.prompts import conversations
from skipdecode.training.self_generated import write_with_job

#: Words of a post.
LONGEST = 90
ASK = "Summarize this post in one or two sentences.\n\n"
#: Questions of results/smollm2, which none may have learned from.
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
    checkpoint = Checkpoint.resolve(model)

    def write(prompts, options, name):  # type: ignore[no-untyped-def]
        job = GenerationJob(
            checkpoint,
            prompts,
            file.with_name(f"{name}.jsonl"),
            speedup=1,
            batch_size=128,
            seed=seed,
            options=options,
            engine=engine,
        )
        with tqdm(desc=name) as bar:
            return write_with_job(job, bar)

    held_out = {json.loads(line)["messages"][0]["content"] for line in HELD_OUT.read_text("utf-8").splitlines()}
    found = conversations(checkpoint, questions, write, typer.echo)
    chats = [chat for chat in found if not any(message.content in held_out for message in chat)]
    if posts is not None:
        lines = posts.read_text("utf-8").splitlines()
        random.Random(0).shuffle(lines)
        posts_asked = [ASK + " ".join(json.loads(line)["post"].split()[:LONGEST]) for line in lines[:summaries]]
        chats += [(Message("user", asked),) for asked in posts_asked]
    random.Random(1).shuffle(chats)
    rows = ({"messages": as_json(chat)} for chat in chats)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
