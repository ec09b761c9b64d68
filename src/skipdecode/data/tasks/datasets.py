"""The paper's data sets: fixed columns, and a prompt format for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import TaskError
from .base import Example, Task, holds_text
from .splits import JSONL, split_rows

#: What the column of the text to write is called here, whatever it is called in the data.
REFERENCE = "reference"


@dataclass(frozen=True, kw_only=True)
class DataSet(Task):
    """A published data set.

    Attributes:
        forms: for each way in which its rows are published, what each column is called here.
        write: makes a prompt of a row's texts, by the names of ``forms``, and of ``max_source_words``.
        max_source_words: how many words of the source a prompt has at most; None where there is no source to cut.
        files: files of each split, in the order they are looked for in a folder.
        hub_config: the configuration that the data set on the hub needs.
    """

    forms: Sequence[Mapping[str, str]]
    write: Callable[[Mapping[str, str], int | None], str]
    distinct: bool = False
    options: tuple[str, ...] = ()
    max_source_words: int | None = None
    files: Mapping[str, Sequence[str]] = field(default_factory=lambda: JSONL)
    hub_config: str | None = None

    @property
    def prompt_columns(self) -> list[tuple[str, ...]]:
        """Those of each form but the reference's."""
        return [_prompt_columns(form) for form in self.forms]

    @property
    def described(self) -> str:
        """Each form's columns."""
        return " or ".join(" and ".join(form) for form in self.forms)

    def example(self, row: Mapping[str, Any]) -> Example:
        """The prompt in the data set's format; line breaks in the reference become spaces."""
        form = self._form(row)
        self.check_text(row, _prompt_columns(form))
        texts = {name: row[column] for column, name in form.items() if holds_text(row.get(column))}
        reference = texts.get(REFERENCE)
        prompt = self.write(texts, self.max_source_words)
        return Example(prompt, () if reference is None else (normalize_whitespace(reference),))

    def check_reference(self, row: Mapping[str, Any]) -> None:
        """Raises TaskError for a row without a reference."""
        self.check_text(row, [column for column, name in self._form(row).items() if name == REFERENCE])

    def read(self, folder: Path, split: str) -> list[Example]:
        """From the files of a folder, or of the data set of this name on the hub."""
        line = self.prompt_columns[0][0]
        return self.examples(split_rows(folder, split, self.files[split], self.hub_config, line), split)

    def _form(self, row: Mapping[str, Any]) -> Mapping[str, str]:
        """The form that most of the row's text is in, that of its prompt above all."""

        def fills(form: Mapping[str, str]) -> tuple[bool, int]:
            texts = {name for column, name in form.items() if holds_text(row.get(column))}
            return {*form.values()} - texts <= {REFERENCE}, len(texts)

        return max(self.forms, key=fills)


def _prompt_columns(form: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(column for column, name in form.items() if name != REFERENCE)


def normalize_whitespace(text: str, max_words: int | None = None) -> str:
    """One space between words and no line breaks; with ``max_words``, only so many, each up to 30 characters.

    A path or a link can have hundreds of tokens, and a model has only so many positions.
    """
    parts = text.split()
    return " ".join(parts if max_words is None else [part[:30] for part in parts[:max_words]])


ATTRIBUTE = re.compile(r"\s*([^\[\],]+)\[([^\]]*)\]\s*(?:,|$)")


def _restaurant(texts: Mapping[str, str], max_words: int | None) -> str:
    """``name[Aromi], food[English]`` becomes ``name Aromi, food English ->``: two thirds of the tokens."""
    mr = texts["mr"]
    attributes = ATTRIBUTE.findall(mr)
    if not attributes or ATTRIBUTE.sub("", mr).strip():
        raise TaskError(f"not a meaning representation like 'name[Aromi], food[English]': {mr!r}")
    return ", ".join(f"{key.strip()} {value.strip()}" for key, value in attributes) + " ->"


def _post(texts: Mapping[str, str], max_words: int | None) -> str:
    """``Post: Weird crash. After installing my new GPU … TL;DR:``; line breaks become spaces."""
    title = f"{normalize_whitespace(texts['title'])}. " if "title" in texts else ""
    return f"Post: {title}{normalize_whitespace(texts['post'], max_words)} TL;DR:"


def _article(texts: Mapping[str, str], max_words: int | None) -> str:
    """The article's beginning and, after an empty line, ``TL;DR:``, as GPT-2 was asked."""
    return f"{normalize_whitespace(texts['article'], max_words)}\n\nTL;DR:"


#: E2E NLG (Novikova et al., 2017): a restaurant's attributes in, a description out; on the hub ``tuetschek/e2e_nlg``.
#: ``GEM/e2e_nlg`` is read too, but is a cleaned set, one reference a row: no figure on it compares.
E2E = DataSet(
    name="e2e",
    forms=(
        {"mr": "mr", "ref": REFERENCE},
        {"meaning_representation": "mr", "human_reference": REFERENCE},
        {"meaning_representation": "mr", "target": REFERENCE},
    ),
    write=_restaurant,
    distinct=True,
    max_new_tokens=80,
    files={"train": ("trainset.csv",), "validation": ("devset.csv",), "test": ("testset_w_refs.csv",)},
)
#: Reddit posts and their authors' own TL;DR (Völske et al., 2017); the second form is Webis-TLDR-17's, without titles.
REDDIT_TLDR = DataSet(
    name="reddit_tldr",
    forms=({"title": "title", "post": "post", "summary": REFERENCE}, {"content": "post", "summary": REFERENCE}),
    write=_post,
    options=("max_source_words",),
    max_source_words=120,
    max_new_tokens=60,
)
#: CNN/DailyMail (See et al., 2017): a news article in, its highlights out; on the hub ``abisee/cnn_dailymail``.
CNN_DM = DataSet(
    name="cnn_dm",
    forms=({"article": "article", "highlights": REFERENCE},),
    write=_article,
    options=("max_source_words",),
    max_source_words=400,
    max_new_tokens=120,
    # The validation split may also be its first 300 rows.
    files=JSONL | {"validation": (*JSONL["validation"], "validation_300.jsonl")},
    hub_config="3.0.0",
)
