"""CNN/DailyMail (See et al., 2017): a news article in, its highlights out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .base import JSONL, Example, Task, examples, normalize_whitespace, read_split

#: The validation split may also be its first 300 rows.
FILES = JSONL | {"validation": (*JSONL["validation"], "validation_300.jsonl")}
FORMS = ({"article": "article", "highlights": "highlights"},)


@dataclass(frozen=True)
class CnnDm(Task):
    """Article to highlights.

    Attributes:
        words: how many words of an article the prompt has at most.
    """

    words: int = 400

    name = "cnn_dm"
    columns = ("article",)
    reference = "highlights"
    forms = FORMS
    max_new_tokens = 120

    def prompt(self, row: Mapping[str, str]) -> str:
        """The article's beginning and, after an empty line, ``TL;DR:``, as GPT-2 was asked."""
        return f"{normalize_whitespace(row['article'], self.words)}\n\nTL;DR:"

    def read(self, folder: Path, split: str) -> list[Example]:
        """``folder`` holds train.jsonl, validation.jsonl and test.jsonl, or is ``abisee/cnn_dailymail`` on the hub."""
        rows = read_split(folder, split, FILES[split], FORMS, config="3.0.0")
        return examples(((self.prompt(row), normalize_whitespace(row["highlights"])) for row in rows), split)
