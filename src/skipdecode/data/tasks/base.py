"""What a task is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import TaskError
from ..chat import Prompt


@dataclass(frozen=True)
class Example:
    """One prompt and the responses that people wrote for it (none where only a prompt is known)."""

    prompt: Prompt
    references: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """How rows are read, prompted and scored.

    Attributes:
        name: what the command line calls it.
        max_new_tokens: how many new tokens its texts need at most.
        distinct: whether inputs repeat, one row per reference, and are meant to be generated once.
        options: its fields that a user may set.
    """

    name: str
    max_new_tokens: int
    distinct: bool
    options: tuple[str, ...]

    @property
    @abstractmethod
    def prompt_columns(self) -> Sequence[tuple[str, ...]]:
        """The columns that a prompt may be made of: each entry is enough. A line of a text file is the first column."""

    @property
    @abstractmethod
    def described(self) -> str:
        """The columns of a whole row, for messages."""

    @abstractmethod
    def example(self, row: Mapping[str, Any]) -> Example:
        """The prompt of a row, and its references if it has any. Raises TaskError for a row without a prompt."""

    @abstractmethod
    def check_reference(self, row: Mapping[str, Any]) -> None:
        """Raises TaskError for a row without a reference."""

    @abstractmethod
    def read(self, folder: Path, split: str) -> list[Example]:
        """Examples of a split (``train``, ``validation`` or ``test``) from the task's own files, or from the hub.

        ``train`` keeps one example per reference; the others gather all references of a prompt.

        Raises:
            TaskError: no such data, or a row without prompt or reference.
        """

    def examples(self, rows: Iterable[tuple[str, Mapping[str, Any]]], split: str) -> list[Example]:
        """The examples of rows, each given with its place for messages, as :meth:`read` returns them."""
        pairs: list[tuple[Prompt, str]] = []
        for where, row in rows:
            try:
                example = self.example(row)
                if not example.references:
                    self.check_reference(row)
            except TaskError as problem:
                raise TaskError(f"{where}: {problem}") from None
            pairs += [(example.prompt, reference) for reference in example.references]
        return [Example(prompt, (text,)) for prompt, text in pairs] if split == "train" else gather(pairs)

    def check_text(self, row: Mapping[str, Any], columns: Iterable[str]) -> None:
        """Raises TaskError for columns without text; where there are no such columns, it says which there are."""
        empty = [column for column in columns if not holds_text(row.get(column))]
        if not empty:
            return
        message = f"no {' and no '.join(empty)}"
        if not set(empty) <= set(row):
            message += f": the columns are {self.described}; it has {', '.join(map(str, row))[:200] or 'none'}"
        raise TaskError(message)

    def score(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        """Corpus BLEU (lower-cased sacrebleu) and mean ROUGE-L, 0 to 100: each text against all its references."""
        from ..metrics import DEFAULT

        return {metric.name: metric.score(texts, references) for metric in DEFAULT}


def holds_text(value: object) -> bool:
    """Whether it is a string of more than white space."""
    return isinstance(value, str) and bool(value.strip())


def subsample(examples: Sequence[Example], count: int) -> list[Example]:
    """So many of them, from beginning to end: data sets are often sorted by length."""
    count = min(count, len(examples))
    return [examples[i * len(examples) // count] for i in range(count)]


def gather(pairs: Iterable[tuple[Prompt, str]]) -> list[Example]:
    """One example per distinct prompt, with all its references, in order of first appearance."""
    references: dict[Prompt, list[str]] = {}
    for prompt, reference in pairs:
        references.setdefault(prompt, []).append(reference)
    return [Example(prompt, tuple(texts)) for prompt, texts in references.items()]
