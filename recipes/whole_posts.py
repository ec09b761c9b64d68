"""Posts as plain text to learn from: python recipes/whole_posts.py TRAIN.jsonl OUTPUT.jsonl WORDS

Summaries alone are a tenth of the text. Each post becomes one row that ends in its TL;DR, as the task has it, and one
of the words that the task's prompt leaves out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(source: str, target: str, words: str) -> None:
    """Write rows of ``prompt`` and ``response`` for ``--task jsonl``."""
    limit = int(words)
    with Path(source).open(encoding="utf-8") as rows, Path(target).open("w", encoding="utf-8") as out:
        for row in map(json.loads, rows):
            post = row["post"].split()
            title, summary = (" ".join(row[key].split()) for key in ("title", "summary"))
            texts = [f"{title}. {' '.join(post[:limit])} TL;DR: {summary}", " ".join(post[limit:])]
            for text in filter(None, texts):
                print(json.dumps({"prompt": "Post:", "response": text}), file=out)


if __name__ == "__main__":
    main(*sys.argv[1:])
