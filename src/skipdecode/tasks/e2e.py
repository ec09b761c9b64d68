"""E2E NLG (Novikova et al., 2017): a restaurant's attributes in, a description out; the release's CSV files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from .base import Example, Task, TaskError, gather, read_rows

FILES = {"train": "trainset.csv", "validation": "devset.csv", "test": "testset_w_refs.csv"}
ATTRIBUTE = re.compile(r"\s*([^\[\],]+)\[([^\]]*)\]\s*(?:,|$)")


class E2E(Task):
    """Meaning representation to text."""

    name = "e2e"
    columns = ("mr",)
    reference = "ref"
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
        """``folder`` holds trainset.csv, devset.csv and testset_w_refs.csv."""
        path = folder / FILES[split]
        pairs = []
        for number, row in enumerate(read_rows(path), 2):
            if not row.get("mr") or not row.get("ref"):
                raise TaskError(f"{path}, row {number}: needs the columns mr and ref")
            # The release has stray double spaces; decoding never sees them in the references' tokens.
            pairs.append((self.prompt(row), " ".join(row["ref"].split())))
        if split == "train":
            return [Example(prompt, (reference,)) for prompt, reference in pairs]
        return gather(iter(pairs))
