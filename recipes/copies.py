"""What teaches a small model to use the post: python recipes/copies.py TRAIN.jsonl COPIES.jsonl TITLES.jsonl TIMES

Trained on six thousand posts from little, it writes summaries that hardly depend on them. What it lacks is copying, and
any text can teach that: a piece of a post, a handful of its words in random order (which nothing but copying predicts),
or the title above the post, each to be written once more after ``TL;DR:``. COPIES has these three rows for every post,
TIMES over. TITLES, for the task itself, has every post twice: with its summary, and with its title for a summary.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import typer


def main(source: Path, copies: Path, titles: Path, times: int) -> None:
    """Write COPIES, for --task jsonl, TIMES over, and TITLES, for --task reddit_tldr, from the posts of SOURCE."""
    draw = random.Random(0)
    with source.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    with copies.open("w", encoding="utf-8") as out:
        for row in rows * times:
            post, title = row["post"].split(), " ".join(row["title"].split())
            length = draw.randint(8, 30)
            start = draw.randint(0, max(0, len(post) - length))
            piece = " ".join(post[start : start + length])
            shuffled = " ".join(draw.sample(post[:60], min(length, len(post[:60]))))
            for shown, again in ((piece, piece), (shuffled, shuffled), (f"{title}. {' '.join(post[:25])}", title)):
                print(json.dumps({"prompt": "Post:", "response": f"{shown} TL;DR: {again}"}), file=out)
    with titles.open("w", encoding="utf-8") as out:
        for row in rows:
            out.writelines(json.dumps(row | {"summary": row[key]}) + "\n" for key in ("summary", "title"))


if __name__ == "__main__":
    typer.run(main)
