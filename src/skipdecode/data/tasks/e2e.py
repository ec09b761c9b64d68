"""E2E NLG (Novikova et al., 2017): a restaurant's attributes in, a description out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import TaskError
from .base import Task

ATTRIBUTE = re.compile(r"\s*([^\[\],]+)\[([^\]]*)\]\s*(?:,|$)")

FILES = {"train": ("trainset.csv",), "validation": ("devset.csv",), "test": ("testset_w_refs.csv",)}


@dataclass(frozen=True)
class E2E(Task):
    """Meaning representation to text.

    A folder holds trainset.csv, devset.csv and testset_w_refs.csv; on the hub it is ``tuetschek/e2e_nlg``.
    ``GEM/e2e_nlg`` is read too, but is a cleaned set, one reference a row: no figure on it compares.
    """

    name = "e2e"
    forms = (
        {"mr": "mr", "ref": "ref"},
        {"meaning_representation": "mr", "human_reference": "ref"},
        {"meaning_representation": "mr", "target": "ref"},
    )
    reference = "ref"
    files = FILES
    distinct = True
    max_new_tokens = 80

    def prompt(self, row: Mapping[str, Any]) -> str:
        """``name[Aromi], food[English]`` becomes ``name Aromi, food English ->``: two thirds of the tokens."""
        mr = row["mr"]
        attributes = ATTRIBUTE.findall(mr)
        if not attributes or ATTRIBUTE.sub("", mr).strip():
            raise TaskError(f"not a meaning representation like 'name[Aromi], food[English]': {mr!r}")
        return ", ".join(f"{key.strip()} {value.strip()}" for key, value in attributes) + " ->"
