"""Reddit posts and their authors' own TL;DR (Völske et al., 2017): a post in, a line out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .base import Task, normalize_whitespace


@dataclass(frozen=True)
class RedditTldr(Task):
    """Post to TL;DR. A folder holds train.jsonl, validation.jsonl (or valid.jsonl) and test.jsonl.

    Attributes:
        max_source_words: how many words of a post the prompt has at most.
    """

    max_source_words: int = 120

    name = "reddit_tldr"
    #: The second is Webis-TLDR-17's, which has no titles.
    forms = (
        {"title": "title", "post": "post", "summary": "summary"},
        {"content": "post", "summary": "summary"},
    )
    reference = "summary"
    max_new_tokens = 60

    def prompt(self, row: Mapping[str, Any]) -> str:
        """``Post: Weird crash. After installing my new GPU … TL;DR:``; line breaks become spaces."""
        title = f"{normalize_whitespace(row['title'])}. " if "title" in row else ""
        return f"Post: {title}{normalize_whitespace(row['post'], self.max_source_words)} TL;DR:"
