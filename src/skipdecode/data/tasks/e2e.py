"""E2E NLG (Novikova et al., 2017): a restaurant's attributes in, a description out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ...errors import TaskError
from .base import Example, Task, examples, normalize_whitespace, read_split

FILES = {"train": "trainset.csv", "validation": "devset.csv", "test": "testset_w_refs.csv"}
FORMS = (
    {"mr": "mr", "ref": "ref"},
    {"meaning_representation": "mr", "human_reference": "ref"},
    {"meaning_representation": "mr", "target": "ref"},
)
ATTRIBUTE = re.compile(r"\s*([^\[\],]+)\[([^\]]*)\]\s*(?:,|$)")


class E2E(Task):
    """Meaning representation to text."""

    name = "e2e"
    columns = ("mr",)
    reference = "ref"
    forms = FORMS
    distinct = True
    max_new_tokens = 80

    def prompt(self, row: Mapping[str, str]) -> str:
        """``name[Aromi], food[English]`` becomes ``name Aromi, food English ->``: two thirds of the tokens."""
        mr = row["mr"]
        attributes = ATTRIBUTE.findall(mr)
        if not attributes or ATTRIBUTE.sub("", mr).strip():
            raise TaskError(f"not a meaning representation like 'name[Aromi], food[English]': {mr!r}")
        return ", ".join(f"{key.strip()} {value.strip()}" for key, value in attributes) + " ->"

    def read(self, folder: Path, split: str) -> list[Example]:
        """``folder`` holds trainset.csv, devset.csv and testset_w_refs.csv, or is ``tuetschek/e2e_nlg`` on the hub.

        ``GEM/e2e_nlg`` is read too, but is a cleaned set, one reference a row: no figure on it compares.
        """
        rows = read_split(folder, split, [FILES[split]], FORMS)
        # The release has stray double spaces; decoding never sees them in the references' tokens.
        return examples(((self.prompt(row), normalize_whitespace(row["ref"])) for row in rows), split)
