"""The paper's data sets, each with fixed columns and its own prompt format."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import DataError
from .base import Example, Task, holds_text
from .splits import FILES, split_rows

#: Our name for the column of references, whatever its name in the data.
REFERENCE = "reference"


@dataclass(frozen=True, kw_only=True)
class DataSet(Task):
    """A published data set.

    Attributes:
        versions: for each published version, a mapping from its columns to our names of them.
        write: makes a prompt of a row's texts (by our names).
        files: possible file names of each split; the first that exists is read.
        hub_config: configuration name on the hub.
    """

    versions: Sequence[Mapping[str, str]]
    write: Callable[[Mapping[str, str]], str]
    files: Mapping[str, Sequence[str]] = field(default_factory=lambda: FILES)
    hub_config: str | None = None

    @property
    def prompt_columns(self) -> list[tuple[str, ...]]:
        """Return, for each published version of the data, the columns that make a prompt."""
        return [_prompt_columns(version) for version in self.versions]

    @property
    def described(self) -> str:
        """Return the columns of each published version of the data, for error messages."""
        return " or ".join(" and ".join(version) for version in self.versions)

    def example(self, row: Mapping[str, Any]) -> Example:
        """Make the prompt in the data set's format; line breaks in the reference become spaces."""
        version = self._version(row)
        self.check_text(row, _prompt_columns(version))
        texts = {name: row[column] for column, name in version.items() if holds_text(row.get(column))}
        reference = texts.get(REFERENCE)
        prompt = self.write(texts)
        return Example(prompt, () if reference is None else (normalize_whitespace(reference),))

    def check_reference(self, row: Mapping[str, Any]) -> None:
        """Raise DataError if a row has no reference."""
        self.check_text(row, [column for column, name in self._version(row).items() if name == REFERENCE])

    def read(self, folder: Path, split: str) -> list[Example]:
        """Read a split from a folder's files, or from the hub if ``folder`` is the name of a data set there."""
        line = self.prompt_columns[0][0]
        return self.examples(split_rows(folder, split, self.files[split], self.hub_config, line), split)

    def _version(self, row: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the version, as a mapping from its columns to our names, of which the row fills most columns.

        A version whose prompt columns are all filled is preferred.
        """

        def fills(version: Mapping[str, str]) -> tuple[bool, int]:
            texts = {name for column, name in version.items() if holds_text(row.get(column))}
            return {*version.values()} - texts <= {REFERENCE}, len(texts)

        return max(self.versions, key=fills)


def _prompt_columns(version: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(column for column, name in version.items() if name != REFERENCE)


def normalize_whitespace(text: str, max_words: int | None = None) -> str:
    """Join words by single spaces; ``max_words`` limits their number, and each word to 30 characters.

    Without the second limit, one path or link could have hundreds of tokens.
    """
    parts = text.split()
    return " ".join(parts if max_words is None else [part[:30] for part in parts[:max_words]])


#: Words of a post, and of an article, in a prompt.
POST, ARTICLE = 120, 400

ATTRIBUTE = re.compile(r"\s*([^\[\],]+)\[([^\]]*)\]\s*(?:,|$)")


def _restaurant(texts: Mapping[str, str]) -> str:
    """Turn ``name[Aromi], food[English]`` into ``name Aromi, food English ->``, which has a third fewer tokens."""
    mr = texts["mr"]
    attributes = ATTRIBUTE.findall(mr)
    if not attributes or ATTRIBUTE.sub("", mr).strip():
        raise DataError(f"not a meaning representation like 'name[Aromi], food[English]': {mr!r}")
    return ", ".join(f"{key.strip()} {value.strip()}" for key, value in attributes) + " ->"


def _post(texts: Mapping[str, str]) -> str:
    """Make ``Post: Weird crash. After installing my new GPU … TL;DR:``; line breaks become spaces."""
    title = f"{normalize_whitespace(texts['title'])}. " if "title" in texts else ""
    return f"Post: {title}{normalize_whitespace(texts['post'], POST)} TL;DR:"


def _article(texts: Mapping[str, str]) -> str:
    """Make a prompt like GPT-2's: the article's beginning, an empty line, and ``TL;DR:``."""
    return f"{normalize_whitespace(texts['article'], ARTICLE)}\n\nTL;DR:"


#: E2E NLG (Novikova et al., 2017): describe a restaurant by its attributes; ``tuetschek/e2e_nlg`` on the hub.
#: ``GEM/e2e_nlg`` works too, but it is cleaned and has one reference per row: scores are not comparable.
E2E = DataSet(
    name="e2e",
    versions=(
        {"mr": "mr", "ref": REFERENCE},
        {"meaning_representation": "mr", "human_reference": REFERENCE},
        {"meaning_representation": "mr", "target": REFERENCE},
    ),
    write=_restaurant,
    distinct=True,
    max_new_tokens=80,
    files={"train": ("trainset.csv",), "validation": ("devset.csv",), "test": ("testset_w_refs.csv",)},
)
#: Summarize Reddit posts as their authors did (Völske et al., 2017); the second is Webis-TLDR-17, without titles.
REDDIT_TLDR = DataSet(
    name="reddit_tldr",
    versions=({"title": "title", "post": "post", "summary": REFERENCE}, {"content": "post", "summary": REFERENCE}),
    write=_post,
    max_new_tokens=60,
)
#: CNN/DailyMail (See et al., 2017): summarize a news article by its highlights; ``abisee/cnn_dailymail`` on the hub.
CNN_DM = DataSet(
    name="cnn_dm",
    versions=({"article": "article", "highlights": REFERENCE},),
    write=_article,
    max_new_tokens=120,
    # validation_300.jsonl: the first 300 rows of the validation split.
    files=FILES | {"validation": (*FILES["validation"], "validation_300.jsonl")},
    hub_config="3.0.0",
)
