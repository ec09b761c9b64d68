"""Posts as plain text to learn from: python recipes/whole_posts.py TRAIN.jsonl OUTPUT.jsonl WORDS

Summaries alone are a tenth of the text. Each post becomes one row that ends in its TL;DR, as the task has it, and one
of the words that the task's prompt leaves out.
"""

from __future__ import annotations

import json
from pathlib import Path

import typer


def main(source: Path, target: Path, words: int) -> None:
    """Write the posts of SOURCE to TARGET, cut after so many WORDS: prompt and response for --task jsonl."""
    with source.open(encoding="utf-8") as rows, target.open("w", encoding="utf-8") as out:
        for row in map(json.loads, rows):
            post = row["post"].split()
            title, summary = (" ".join(row[key].split()) for key in ("title", "summary"))
            texts = [f"{title}. {' '.join(post[:words])} TL;DR: {summary}", " ".join(post[words:])]
            for text in filter(None, texts):
                print(json.dumps({"prompt": "Post:", "response": text}), file=out)


if __name__ == "__main__":
    typer.run(main)
