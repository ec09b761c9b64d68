"""Reddit posts and their authors' own TL;DR (Völske et al., 2017): a post in, a line out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .base import JSONL, Example, Task, examples, normalize_whitespace, read_split

#: The second is Webis-TLDR-17's, which has no titles.
FORMS = (
    {"title": "title", "post": "post", "summary": "summary"},
    {"content": "post", "summary": "summary"},
)


@dataclass(frozen=True)
class RedditTldr(Task):
    """Post to TL;DR.

    Attributes:
        words: how many words of a post the prompt has at most.
    """

    words: int = 120

    name = "reddit_tldr"
    columns = ("title", "post")
    reference = "summary"
    forms = FORMS
    max_new_tokens = 60

    def prompt(self, row: Mapping[str, str]) -> str:
        """``Post: Weird crash. After installing my new GPU … TL;DR:``; line breaks become spaces."""
        title = f"{normalize_whitespace(row['title'])}. " if "title" in row else ""
        return f"Post: {title}{normalize_whitespace(row['post'], self.words)} TL;DR:"

    def read(self, folder: Path, split: str) -> list[Example]:
        """``folder`` holds train.jsonl, validation.jsonl (or valid.jsonl) and test.jsonl, or is a hub name."""
        rows = read_split(folder, split, JSONL[split], FORMS)
        return examples(((self.prompt(row), normalize_whitespace(row["summary"])) for row in rows), split)
