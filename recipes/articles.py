"""Requests to summarise news: two thirds of the articles as prompts of own texts, the last third to score summaries by.

    python recipes/articles.py DATA OUTPUT_DIR

DATA: the folder of CNN/DailyMail. Writes OUTPUT_DIR/prompts.jsonl and test.jsonl.
"""

from __future__ import annotations

import json
from pathlib import Path

import typer

from skipdecode.data.examples import read_examples
from skipdecode.data.tasks import get_task

ASK = "Summarize this article in two or three sentences.\n\n"
#: Words of an article.
LONGEST = 300


def main(data: Path, output: Path) -> None:
    """Write both files, one conversation a line."""
    rows = []
    for each in read_examples(data, get_task("cnn_dm"), "validation"):
        article = str(each.prompt).removesuffix("\n\nTL;DR:")
        asked = ASK + " ".join(article.split()[:LONGEST])
        rows.append({"messages": [{"role": "user", "content": asked}], "response": each.references[0]})
    learned = len(rows) * 2 // 3
    output.mkdir(parents=True, exist_ok=True)
    if output.samefile(data):
        raise SystemExit(f"{output} holds the articles: give another folder")
    for name, part in (("prompts", rows[:learned]), ("test", rows[learned:])):
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in part)
        (output / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
