"""CNN/DailyMail (See et al., 2017): a news article in, its highlights out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .base import Task, normalize_whitespace
from .splits import JSONL


@dataclass(frozen=True)
class CnnDm(Task):
    """Article to highlights.

    A folder holds train.jsonl, validation.jsonl and test.jsonl; on the hub it is ``abisee/cnn_dailymail``.

    Attributes:
        max_source_words: how many words of an article the prompt has at most.
    """

    max_source_words: int = 400

    name = "cnn_dm"
    forms = ({"article": "article", "highlights": "highlights"},)
    reference = "highlights"
    #: The validation split may also be its first 300 rows.
    files = JSONL | {"validation": (*JSONL["validation"], "validation_300.jsonl")}
    hub_config = "3.0.0"
    max_new_tokens = 120

    def prompt(self, row: Mapping[str, Any]) -> str:
        """The article's beginning and, after an empty line, ``TL;DR:``, as GPT-2 was asked."""
        return f"{normalize_whitespace(row['article'], self.max_source_words)}\n\nTL;DR:"
