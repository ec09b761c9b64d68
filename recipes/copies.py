"""Texts to learn copying from: python recipes/copies.py TRAIN.jsonl OUTPUT.jsonl TIMES

A small model trained on six thousand posts writes summaries that hardly depend on the post. What it lacks is copying,
and any text can teach that: a piece of a post, a handful of its words in random order (which nothing but copying
predicts), or the title above the post, each to be written once more after ``TL;DR:``. Every post gives these three
rows, TIMES over.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path


def main(source: str, target: str, times: str) -> None:
    """Write rows of ``prompt`` and ``response`` for ``--task jsonl``."""
    draw = random.Random(0)
    with Path(source).open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    with Path(target).open("w", encoding="utf-8") as out:
        for row in rows * int(times):
            post, title = row["post"].split(), " ".join(row["title"].split())
            length = draw.randint(8, 30)
            start = draw.randint(0, max(0, len(post) - length))
            piece = " ".join(post[start : start + length])
            words = " ".join(draw.sample(post[:60], min(length, len(post[:60]))))
            for shown, again in ((piece, piece), (words, words), (f"{title}. {' '.join(post[:25])}", title)):
                print(json.dumps({"prompt": "Post:", "response": f"{shown} TL;DR: {again}"}), file=out)


if __name__ == "__main__":
    main(*sys.argv[1:])
