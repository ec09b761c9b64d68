"""The base class of tasks, and examples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import DataError
from ..chat import Prompt


@dataclass(frozen=True)
class Example:
    """One prompt and its reference responses, of which there may be none.

    ``cut``: the response was cut off, so that its end is no end to learn.
    """

    prompt: Prompt
    references: tuple[str, ...]
    cut: bool = False


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A way to read rows, make prompts of them, and score texts.

    Attributes:
        name: its name on the command line.
        max_new_tokens: upper limit of generated tokens.
        distinct: whether inputs repeat, one row per reference, so that generation keeps each once.
    """

    name: str
    max_new_tokens: int
    distinct: bool = False

    @property
    @abstractmethod
    def prompt_columns(self) -> Sequence[tuple[str, ...]]:
        """Return sets of columns, each of which makes a prompt; a text file's lines are the first set's first."""

    @property
    @abstractmethod
    def described(self) -> str:
        """Return a description of the expected columns, for error messages."""

    @abstractmethod
    def example(self, row: Mapping[str, Any]) -> Example:
        """Return the example of a row: its prompt, and any references. Raises DataError if it has no prompt."""

    @abstractmethod
    def check_reference(self, row: Mapping[str, Any]) -> None:
        """Raise DataError, which says why, if a row has no reference."""

    @abstractmethod
    def read(self, folder: Path, split: str) -> list[Example]:
        """Read a split (``train``, ``validation`` or ``test``) from a folder's files or from the hub.

        ``train`` has an example per reference; the other splits have one per prompt, with all its references.

        Raises:
            DataError: the data is missing, or a row has no prompt or reference.
        """

    def examples(self, rows: Iterable[tuple[str, Mapping[str, Any]]], split: str) -> list[Example]:
        """Make the examples of a split from (place, row) pairs, as :meth:`read`; error messages name the place."""
        found: list[Example] = []
        for where, row in rows:
            try:
                example = self.example(row)
                if not example.references:
                    self.check_reference(row)
            except DataError as problem:
                raise DataError(f"{where}: {problem}") from None
            found.append(replace(example, cut=row.get("finish_reason") == "length"))
        if split == "train":
            return [Example(each.prompt, (text,), each.cut) for each in found for text in each.references]
        cut = {each.prompt: each.cut for each in reversed(found)}  # of the first reference: the loss is on that one
        gathered = gather((each.prompt, each.references) for each in found)
        return [replace(each, cut=cut[each.prompt]) for each in gathered]

    def check_text(self, row: Mapping[str, Any], columns: Iterable[str]) -> None:
        """Raise DataError if one of ``columns`` holds no text in ``row``."""
        empty = [column for column in columns if not holds_text(row.get(column))]
        if not empty:
            return
        message = f"no {' and no '.join(empty)}"
        if not set(empty) <= set(row):
            message += f": the columns are {self.described}; it has {', '.join(map(str, row))[:200] or 'none'}"
        raise DataError(message)

    def score(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        """Return corpus BLEU (lower-cased sacrebleu) and mean ROUGE-L, 0 to 100, against all references."""
        from ..metrics import DEFAULT

        return {metric.name: metric.score(texts, references) for metric in DEFAULT}


def holds_text(value: object) -> bool:
    """Return whether ``value`` is a string of more than white space."""
    return isinstance(value, str) and bool(value.strip())


def subsample(examples: Sequence[Example], count: int) -> list[Example]:
    """Return ``count`` evenly spaced examples, because data sets are often sorted by length."""
    count = min(count, len(examples))
    return [examples[i * len(examples) // count] for i in range(count)]


def gather(rows: Iterable[tuple[Prompt, Iterable[str]]]) -> list[Example]:
    """Return an example per distinct prompt, with all its references, in order of first appearance."""
    references: dict[Prompt, list[str]] = {}
    for prompt, more in rows:
        references.setdefault(prompt, []).extend(more)
    return [Example(prompt, tuple(texts)) for prompt, texts in references.items()]
