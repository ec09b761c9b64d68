"""The form of a task."""

from __future__ import annotations

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SPLITS = ("train", "validation", "test")


class TaskError(ValueError):
    """Data that is missing or not in the task's form."""


@dataclass(frozen=True)
class Example:
    """One prompt and the responses that people wrote for it (at least one)."""

    prompt: str
    references: tuple[str, ...]


class Task(ABC):
    """How a task is read, prompted and scored."""

    name: str
    #: Columns of an input row that the prompt is made of.
    columns: tuple[str, ...]
    #: Column that holds a reference text, where the data has one.
    reference: str
    #: Whether inputs repeat, one row per reference, and are meant to be generated once.
    distinct: bool = False
    #: How many new tokens its texts need at most.
    max_new_tokens: int

    @abstractmethod
    def prompt(self, row: Mapping[str, str]) -> str:
        """The text given to the model for one input row."""

    @abstractmethod
    def read(self, folder: Path, split: str) -> list[Example]:
        """Examples of a split (``train``, ``validation`` or ``test``) from the task's own files.

        ``train`` keeps one example per row; the others gather all references of an input. Raises TaskError.
        """

    def score(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        """Corpus BLEU (0 to 100): lower-cased sacrebleu of each text against all its references."""
        from sacrebleu.metrics import BLEU

        # sacrebleu takes one list per reference position; None marks a row that has fewer.
        columns = [[r[i] if i < len(r) else None for r in references] for i in range(max(map(len, references)))]
        return {"bleu": BLEU(lowercase=True).corpus_score(list(texts), columns).score}


def read_rows(path: Path) -> Iterator[dict[str, str]]:
    """Rows of a CSV or JSONL file that has to be whole: training and test data. Raises TaskError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".csv":
                yield from csv.DictReader(file)
            else:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        try:
                            yield json.loads(line)
                        except json.JSONDecodeError as error:
                            raise TaskError(f"{path}, line {number}: not JSON: {error}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TaskError(f"{path} cannot be read: {error}") from None


def gather(pairs: Iterator[tuple[str, str]]) -> list[Example]:
    """One example per distinct prompt, with all its references, in order of first appearance."""
    references: dict[str, list[str]] = {}
    for prompt, reference in pairs:
        references.setdefault(prompt, []).append(reference)
    return [Example(prompt, tuple(texts)) for prompt, texts in references.items()]
